"""An engine of `invrl engine` in the fleet of a run that has not started it: updates by
disk, kill -9, its return, and the end of the run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from streamed import generate
from torch_trainer import TorchSender
from torch_updates import CANARY, FP32

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.inside_sglang.engine_identity import IDENTITY_PATH, sampling_key
from invrl.errors import ServerError
from invrl.host.network.ports import free_port
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import process_tree, still_running
from invrl.interfaces import StagedWeights
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.config import DiskWeights
from invrl.weights.update.transaction import WeightTransaction

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "a-key.of/this+test=0123456789"
GONE_WITHIN_S = 300.0


class EngineCommand:
    """`invrl engine`, once it says that the engine is ready."""

    def __init__(self, model: Path, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        arguments = [
            "--model-path",
            str(model),
            "--engine.dtype",
            "float32",
            "--port",
            str(port),
        ]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "invrl.cli",
                "engine",
                *arguments,
                "--log-folder",
                str(folder),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "INVRL_ENGINE_KEY": KEY,
            },
            process_group=0,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if self.url in line:
                break
        else:
            raise AssertionError("".join(self.lines))
        self.family = process_tree(self.process.pid)

    def start_key(self) -> str:
        """The key that samples, as the holder of the engine's key finds it."""
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.get(self.url + IDENTITY_PATH, headers=headers, timeout=60)
        return sampling_key(KEY, answer.json()["start"])

    def server_info(self, key: str) -> httpx.Response:
        return httpx.get(
            f"{self.url}/server_info",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )

    def end(self, number: signal.Signals) -> int:
        """Its exit code, once nothing of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=GONE_WITHIN_S)
        self.lines.append(rest)
        assert not still_running(self.family, within_s=GONE_WITHIN_S), "".join(
            self.lines
        )
        return self.process.returncode


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[[], EngineCommand]]:
    """Each time at the same port."""
    port = free_port()
    started: list[EngineCommand] = []

    def start() -> EngineCommand:
        started.append(EngineCommand(tiny_model, port, tmp_path))
        return started[-1]

    yield start
    for command in started:
        command.end(signal.SIGKILL)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.02)


async def held(fleet: Fleet, name: str) -> object:
    staged = StagedWeights(
        version=WeightVersion(0), handle="", checksums={}, num_bytes=0
    )
    return await fleet.engines[name].receiver.checksums(staged)


def request() -> GenerateRequest:
    return GenerateRequest(
        rid=f"external-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 30], np.int32),
        sampling=Sampling(max_new_tokens=4),
    )


async def test_external_engine_that_died_returns_with_the_newest_version(
    start: Callable[[], EngineCommand],
    engine_parent: ForkParent,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = await asyncio.to_thread(start)
    config = EngineConfig(
        num_engines=1,
        external_engines=(command.url,),
        dtype="float32",
        health_interval_s=0.5,
        start_timeout_s=500.0,
    )
    fleet = Fleet(
        config,
        tiny_model,
        tmp_path / "run",
        weights=DiskWeights(),
        heartbeat_timeout_s=6.0,
        external_key=KEY,
        parent=engine_parent,
    )
    sender = TorchSender(tiny_model, weight_folder=tmp_path / "weights")
    transaction = WeightTransaction(
        sender, fleet.receivers, canary_prompts=CANARY, bound=FP32
    )
    updater = WeightUpdater(transaction, fleet)
    await fleet.start()
    try:
        await fleet.check_unchanged()
        sender.train(1)
        await updater.update(WeightVersion(1))
        await fleet.admit()
        with pytest.raises(ServerError, match="holds version 1"):
            await fleet.check_unchanged()
        sender.train(2)
        update = await updater.update(WeightVersion(2))
        assert update.lost_engines == {}
        for name in ("engine-0", "external-0"):
            assert await held(fleet, name) == sender.checksums()

        first_key = fleet.engines["external-0"].server.api_key
        info = await asyncio.to_thread(command.server_info, first_key)
        assert info.status_code == 200
        log = (
            tmp_path / "logs" / f"engine-{command.url.rpartition(':')[2]}.log"
        ).read_text()
        lines_of_processes = [
            " ".join(process.cmdline())
            for process in command.family
            if process.is_running()
        ]
        for text in (info.text, log, *lines_of_processes):
            assert KEY not in text
            assert first_key not in text

        assert await asyncio.to_thread(command.end, signal.SIGKILL) == -signal.SIGKILL
        await until(
            lambda: (
                "external-0" in fleet.evicted
                and not fleet.router.registered(command.url)
            )
        )
        sender.train(3)
        await updater.update(WeightVersion(3))
        fleet.check()

        registered: list[tuple[str, str]] = []
        register = fleet.router.register

        def recorded(url: str, *, api_key: str) -> None:
            headers = {"Authorization": f"Bearer {api_key}"}
            model = httpx.get(f"{url}/model_info", headers=headers, timeout=60).json()
            registered.append((url, model["weight_version"]))
            register(url, api_key=api_key)

        monkeypatch.setattr(fleet.router, "register", recorded)
        command = await asyncio.to_thread(start)
        assert (
            await asyncio.to_thread(command.server_info, first_key)
        ).status_code == 401
        await until(lambda: fleet.router.registered(command.url))
        assert registered == [(command.url, "3")]
        assert await held(fleet, "external-0") == sender.checksums()
        sender.train(4)
        await updater.update(WeightVersion(4))
        assert await held(fleet, "external-0") == sender.checksums()

        # Killed and started again before anybody has noticed: the update finds another
        # engine there.
        fleet._watches.tasks["external-0"].cancel()
        await asyncio.to_thread(command.end, signal.SIGKILL)
        command = await asyncio.to_thread(start)
        sender.train(5)
        update = await updater.update(WeightVersion(5))
        assert list(update.lost_engines) == ["external-0"]
        await until(
            lambda: len(registered) == 2 and fleet.router.registered(command.url)
        )
        assert registered[1] == (command.url, "5")
        assert await held(fleet, "external-0") == sender.checksums()
        # as an interrupt within an update leaves it
        await fleet.engines["external-0"].client.pause()
    finally:
        await fleet.stop()
    assert psutil.pid_exists(command.process.pid)
    key = await asyncio.to_thread(command.start_key)
    async with SglangClient(command.url, limits=fleet.limits, api_key=key) as client:
        result = await generate(client, request())
    assert [span.version for span in result.spans] == [5]
    assert await asyncio.to_thread(command.end, signal.SIGINT) == 130
