"""`invrl verify-weights`: what it compares, says and ends with; the socket between
command and driver."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import msgspec
import pytest
from run_config import config

from invrl.cli.main import main
from invrl.errors import ServerError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.run.loop.verification_socket import Verify, answer_verifications
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.run.settings.folder import make_run_folder
from invrl.store.run_folder import RunFolder
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import Committed
from invrl.weights.update.joining_engines import JoiningEngines
from invrl.weights.update.transaction import WeightTransaction
from invrl.weights.update.verification import ReadBack, Verification, compare

LAYOUT = tuple(
    TensorSpec(name=name, shape=(2, 3), dtype="bfloat16") for name in ("a", "b")
)
COMMITTED = Committed(
    canary_prompts=(),
    staged=StagedWeights(
        version=WeightVersion(7),
        handle="",
        checksums={"a": "1", "b": "2"},
        num_bytes=24,
    ),
    layout=LAYOUT,
)


def read_back(version: str = "7", **checksums: str) -> ReadBack:
    return ReadBack(version=version, checksums=checksums, paused_s=0.0124)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Its path is longer than that of a Unix socket may be."""
    root = tmp_path / ("long" * 30)
    return make_run_folder(config(root, "run"))


def ask(folder: RunFolder, verify: Verify, *flags: str) -> int:
    """The exit code of the command, beside a driver that answers by `verify`."""

    async def run() -> int:
        with folder.held("train"):
            async with answer_verifications(folder, verify):
                return await asyncio.to_thread(
                    main, ["verify-weights", str(folder.path), *flags]
                )

    return asyncio.run(run())


class Receiver:
    """An engine that holds what it is given, or raises it. Like a real one it is paused
    while it is read."""

    def __init__(
        self,
        held: ReadBack | Exception,
        *,
        resumes: bool = True,
        answers: asyncio.Event | None = None,
    ) -> None:
        self.held = held
        self.answers = answers
        self.resumes = resumes
        self.is_paused = False

    async def read_back(self, layout: object) -> ReadBack:
        self.is_paused = not self.resumes
        if self.answers is not None:
            await self.answers.wait()
        if isinstance(self.held, Exception):
            raise self.held
        return self.held


class Engine:
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver


class Fleet:
    def __init__(self, **receivers: Receiver) -> None:
        self.engines = {name: Engine(receiver) for name, receiver in receivers.items()}
        self.evicted: list[str] = []

    def evict(self, name: str, reason: str) -> None:
        self.evicted.append(name)


def updater_of(fleet: Fleet) -> WeightUpdater:
    transaction = WeightTransaction(
        None,  # type: ignore[arg-type]  # no update is run
        None,  # type: ignore[arg-type]
        canary_prompts=(),
        bound=CanaryBound(max_gap=0.0, mean_gap=0.0),
        deadline_s=0.05,
    )
    transaction.committed = COMMITTED
    return WeightUpdater(transaction, fleet)  # type: ignore[arg-type]


def joining_engines(updater: WeightUpdater) -> JoiningEngines:
    return updater._transaction._joining_engines


def test_equal_weights_exit_with_0(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(
        e0=Receiver(read_back(a="1", b="2")), e1=Receiver(read_back(a="1", b="2"))
    )
    assert ask(folder, updater_of(fleet).verify) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: version 7, 2 tensors, 24 bytes, equal to what was committed (paused for 12 ms)"
        for name in ("e0", "e1")
    ]
    assert not folder.verification_path.exists()


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            read_back(a="1", b="x"),
            "DIFFERENT from the committed version 7 in 1, b first",
        ),
        (
            read_back(a="x", b="x"),
            "DIFFERENT from the committed version 7 in 2, a first",
        ),
        (read_back(a="1"), "DIFFERENT from the committed version 7 in 1, b first"),
        (
            read_back(a="1", b="2", c="3"),
            "DIFFERENT from the committed version 7 in 1, c first",
        ),
        (
            read_back("6", a="1", b="2"),
            "equal to version 7, which is committed, but called 6",
        ),
        (WeightSyncError("no reply"), "e1: cannot be read: no reply"),
    ],
)
def test_unequal_engine_is_named_and_exits_with_1(
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    held: ReadBack | Exception,
    said: str,
) -> None:
    fleet = Fleet(
        e0=Receiver(read_back(a="1", b="2")),
        e1=Receiver(held),
        e2=Receiver(read_back(a="1", b="2")),
    )
    assert ask(folder, updater_of(fleet).verify) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert said in second
    assert second.startswith("e1: ")
    assert "equal to what was committed" in first
    assert "equal to what was committed" in third
    assert fleet.evicted == []


def test_engine_that_stays_paused_after_verification_is_evicted(
    folder: RunFolder,
) -> None:
    fleet = Fleet(e0=Receiver(ServerError("gone"), resumes=False))
    assert ask(folder, updater_of(fleet).verify) == 1
    assert fleet.evicted == ["e0"]


def test_verification_waits_for_an_update_and_reports_one_that_does_not_end(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    updater = updater_of(Fleet(e0=Receiver(read_back(a="1", b="2"))))

    async def verify_during_update(wait_s: float) -> Verification:
        with joining_engines(updater).closed():
            refused = await updater.verify(0.0)
            assert "has been in progress for 0 s" in refused.error
            waiting = asyncio.create_task(updater.verify(wait_s))
            await asyncio.sleep(0)
        return await waiting

    assert ask(folder, verify_during_update, "--wait", "60") == 0

    busy = updater_of(Fleet())

    async def refuse(wait_s: float) -> Verification:
        with joining_engines(busy).closed():
            return await busy.verify(wait_s)

    assert ask(folder, refuse, "--wait=0") == 1
    assert "a weight update has been in progress for 0 s" in capsys.readouterr().out


async def test_update_waits_for_a_verification_only_until_its_deadline() -> None:
    hanging = Receiver(read_back(a="1", b="2"), answers=asyncio.Event())
    updater = updater_of(Fleet(e0=hanging))
    verifying = asyncio.create_task(updater.verify(0.0))
    await asyncio.sleep(0)
    update = asyncio.create_task(joining_engines(updater).wait_for_joins())
    await asyncio.sleep(0)
    assert not update.done()
    await update
    assert (
        "the verification of weights is given up: an update waited"
        in (await verifying).error
    )


async def test_verification_before_the_first_version_is_refused() -> None:
    updater = updater_of(Fleet())
    updater._transaction.committed = None
    assert (
        "no version of the weights has been committed"
        in (await updater.verify(0.0)).error
    )


def test_verification_of_a_dead_run_or_without_a_committed_version_is_refused(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify-weights", str(folder.path)]
    folder.verification_path.parent.mkdir()
    folder.verification_path.touch()  # a killed driver left it
    assert main(command) == 2
    assert "no run works in this folder" in capsys.readouterr().err
    with folder.held("train"):
        assert main(command) == 1
        assert "does not answer" in capsys.readouterr().out
        folder.verification_path.unlink()
        assert main(command) == 2
    assert "has not committed a version of the weights yet" in capsys.readouterr().err
    assert main([*command, "--wait", "soon"]) == 2
    assert "not a number of seconds" in capsys.readouterr().err


async def test_only_the_owner_may_connect_and_a_bad_request_is_harmless(
    folder: RunFolder,
) -> None:
    verify = updater_of(Fleet(e0=Receiver(read_back(a="1", b="2")))).verify
    async with answer_verifications(folder, verify):
        mode = stat.S_IMODE(folder.verification_path.stat().st_mode)
        assert mode == 0o600
        for body in (b"\x80\x04pickle\n", b"{}\n", b""):
            reader, writer = await connect(folder)
            writer.write(body)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        reader, writer = await connect(folder)
        writer.write(b'{"wait_s": 1}\n')
        answer = msgspec.json.decode(await reader.readline(), type=Verification)
        writer.close()
    assert answer.all_equal


async def connect(
    folder: RunFolder,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    descriptor = os.open(folder.verification_path.parent, os.O_RDONLY)
    try:
        return await asyncio.open_unix_connection(
            f"/proc/self/fd/{descriptor}/verification.socket"
        )
    finally:
        os.close(descriptor)


def test_verification_that_read_no_weight_is_not_equal() -> None:
    assert not Verification(version="7").all_equal
    assert not Verification(version="7", error="busy").all_equal
    held = compare(COMMITTED, "e0", read_back(a="1", b="2"))
    assert held.num_tensors == 2
    assert held.num_bytes == 24
    assert held.different == ()
