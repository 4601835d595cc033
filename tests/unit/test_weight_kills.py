"""kill -9 of a trainer or an engine in the middle of a write or a copy: engines are on
whole versions, the arena goes on, and nothing stays in shared memory. The processes
have the writer or the loader. They are not forks of this one: a fork has the locks of
all its threads, but not the threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from invrl.errors import WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums import checksums
from invrl.weights.loader import weight_loader
from invrl.weights.loader.loader_messages import LoaderRequest, read_reply
from invrl.weights.tensors.tensor_spec import copy_hashed
from invrl.weights.transports import arena
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter

LAYOUT = tuple(
    TensorSpec(
        name=f"model.layers.{layer}.mlp.down_proj.weight",
        shape=(32, 64),
        dtype="float32",
    )
    for layer in range(8)
)
ANSWER_S = 120.0
CLEAN = multiprocessing.get_context("forkserver")


def stage(writer: ArenaWriter, version: int) -> StagedWeights:
    tensors = {
        spec.name: torch.full(spec.shape, version + index / 8)
        for index, spec in enumerate(LAYOUT)
    }
    return writer.stage(WeightVersion(version), tensors.items())


def kill_in_copy(number: int) -> None:
    """From here on this process dies in the middle of its n-th copy."""
    copies = iter(range(1, number + 1))

    def deadly(
        target: torch.Tensor,
        source: torch.Tensor,
        hash_tensor: Callable[[torch.Tensor], str],
    ) -> str:
        if next(copies) == number:
            target.view(-1)[:100].copy_(source.view(-1)[:100])
            os.kill(os.getpid(), signal.SIGKILL)
        return copy_hashed(target, source, hash_tensor)

    checksums.copy_hashed = deadly


def serve(connection: Connection, answer: Callable[[Any], object]) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(answer(connection.recv()))


class Child:
    """A process that answers calls with the results of `answer`."""

    def __init__(self, answer: Callable[[Any], object]) -> None:
        CLEAN.set_forkserver_preload(["torch", "invrl.weights.loader.weight_loader"])
        self._connection, theirs = CLEAN.Pipe()
        self.process = CLEAN.Process(target=serve, args=(theirs, answer), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: object) -> Any:
        """None if it died before its answer."""
        self._connection.send(question)
        assert self._connection.poll(ANSWER_S), "no answer"
        try:
            return self._connection.recv()
        except EOFError:
            self.process.join(ANSWER_S)
            return None

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


class Trainer:
    """Answers a version with what it staged; told a number first, it dies in that
    copy."""

    def __init__(self) -> None:
        self._writer: ArenaWriter | None = None

    def answer(self, question: tuple[int, int]) -> StagedWeights:
        version, deadly_copy = question
        if self._writer is None:
            self._writer = ArenaWriter(LAYOUT)
        if deadly_copy:
            kill_in_copy(deadly_copy)
        return stage(self._writer, version)


class Engine:
    """Answers a request to the loader with (error, checksums)."""

    def __init__(self, folder: Path) -> None:
        self._reply_path = str(folder / "reply")
        self._model: types.SimpleNamespace | None = None

    def answer(self, question: dict[str, Any]) -> tuple[str, dict[str, str]]:
        deadly_copy = question.pop("deadly_copy", 0)
        if deadly_copy:
            kill_in_copy(deadly_copy)
        if self._model is None:
            parameters = {spec.name: torch.zeros(spec.shape) for spec in LAYOUT}
            self._model = types.SimpleNamespace(
                named_parameters=parameters.items, modules=lambda: ()
            )
        request = LoaderRequest(reply_path=self._reply_path, tensors=LAYOUT, **question)
        weight_loader.run(
            self._model, [(msgspec.json.encode(request).decode(), torch.empty(0))]
        )  # type: ignore[arg-type]
        try:
            return "", read_reply(self._reply_path).checksums
        except WeightSyncError as error:
            return str(error), {}


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


def handle(staged: StagedWeights) -> ArenaHandle:
    return msgspec.json.decode(staged.handle, type=ArenaHandle)


def processes_with(inode: int) -> list[str]:
    """Those that map the arena."""
    process_ids: list[str] = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text().splitlines()
            if any(
                "memfd:invrl-weights" in line and line.split()[4] == str(inode)
                for line in lines
            ):
                process_ids.append(maps.parent.name)
    return process_ids


@pytest.mark.parametrize("alias", [False, True], ids=["copy", "alias"])
@pytest.mark.parametrize("deadly_copy", [1, 5])
def test_engine_keeps_its_version_if_the_trainer_is_killed_during_a_write(
    children: list[Child], tmp_path: Path, alias: bool, deadly_copy: int
) -> None:
    trainer = Child(Trainer().answer)
    engine = Child(Engine(tmp_path).answer)
    children += [trainer, engine]
    first = trainer.ask((1, 0))
    assert engine.ask({"arena": handle(first), "alias": alias, "digest": True}) == (
        "",
        first.checksums,
    )
    inode = handle(first).inode
    assert str(engine.process.pid) in processes_with(inode)
    assert trainer.ask((2, deadly_copy)) is None
    assert trainer.process.exitcode == -signal.SIGKILL
    # The engine holds the first version whole, and is not moved to a slot that nobody
    # finished.
    unfinished = ArenaHandle(path=handle(first).path, inode=inode, slot=1)
    error, _ = engine.ask({"arena": unfinished, "alias": alias})
    assert "cannot be opened" in error
    assert engine.ask({"digest": True}) == ("", first.checksums)
    # The next incarnation's trainer has an arena of its own.
    successor = Child(Trainer().answer)
    children.append(successor)
    second = successor.ask((2, 0))
    assert engine.ask({"arena": handle(second), "alias": alias, "digest": True}) == (
        "",
        second.checksums,
    )
    engine.kill()
    successor.kill()
    assert processes_with(inode) == processes_with(handle(second).inode) == []


def test_slot_is_free_again_after_an_engine_is_killed_during_a_copy(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_SLOT_FREE_WITHIN_S", ANSWER_S)
    writer = ArenaWriter(LAYOUT)
    doomed = Child(Engine(tmp_path).answer)
    other = Child(Engine(tmp_path).answer)
    children += [doomed, other]
    staged = stage(writer, 1)
    assert doomed.ask({"arena": handle(staged), "deadly_copy": 4}) is None
    assert other.ask({"arena": handle(staged)}) == ("", staged.checksums)
    for version in (2, 3):  # the slot that it read is free: its lease ended with it
        staged = stage(writer, version)
        assert other.ask({"arena": handle(staged)}) == ("", staged.checksums)


def test_slot_is_free_again_after_an_engine_that_serves_it_is_killed(
    children: list[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_SLOT_FREE_WITHIN_S", 0.05)
    writer = ArenaWriter(LAYOUT)
    doomed = Child(Engine(tmp_path).answer)
    other = Child(Engine(tmp_path).answer)
    children += [doomed, other]
    first = stage(writer, 1)
    for engine in (doomed, other):
        assert engine.ask({"arena": handle(first), "alias": True, "digest": True}) == (
            "",
            first.checksums,
        )
    second = stage(writer, 2)
    assert other.ask({"arena": handle(second), "alias": True, "digest": True}) == (
        "",
        second.checksums,
    )
    with pytest.raises(WeightSyncError, match="an engine still reads slot 0"):
        stage(writer, 3)
    doomed.kill()
    third = stage(writer, 3)
    assert other.ask({"digest": True}) == ("", second.checksums)
    assert other.ask({"arena": handle(third), "alias": True, "digest": True}) == (
        "",
        third.checksums,
    )
