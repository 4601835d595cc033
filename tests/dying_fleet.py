"""A real fleet of fake engines, a fake router and fake receivers, whose deaths a test
decides."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from invrl.engines.config import EngineConfig
from invrl.engines.fleet import fleet_router, watches
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch import engine_launcher
from invrl.errors import ServerError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.config import ArenaWeights, WeightsConfig

SPEC = TensorSpec(name="w", shape=(1,), dtype="float32")


class Deaths:
    """What the watches find: `engine` and `router` stand in for the heartbeat."""

    def __init__(self) -> None:
        self.of: dict[object, asyncio.Future[str]] = {}

    def future(self, server: object) -> asyncio.Future[str]:
        return self.of.setdefault(server, asyncio.get_running_loop().create_future())

    async def engine(self, server: object, *_: object, **__: object) -> str:
        return await asyncio.shield(self.future(server))

    async def router(self, *_: object, **__: object) -> str:
        return await asyncio.shield(self.future(FakeRouter.made[-1]))


class FakeParent:
    def __init__(self, module: str, *, log: Path) -> None:
        pass

    def stop(self) -> None:
        pass


class FakeServer:
    """An engine's process. `ready` is waited for in a thread, as the real one."""

    made: ClassVar[list[FakeServer]] = []
    may_be_ready = threading.Event()

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        *,
        model_path: Path,
        run_folder: Path,
        **_: object,
    ):
        self.name = name
        self.url = f"http://{name}-{len(self.made)}"
        self.api_key = self.admin_key = "key"
        self.stopped = False
        self.port_lost = False
        self.cannot_stop = False
        self.start_error: Exception | None = None
        self.made.append(self)

    def processes(self) -> FakeServer:
        """What the fake heartbeat knows it by."""
        return self

    def wait_ready(self) -> None:
        while not self.may_be_ready.wait(0.01):
            if self.stopped:
                raise ServerError(f"{self.name} ended")
        if self.start_error is not None:
            raise self.start_error

    def lost_its_port(self) -> bool:
        return self.port_lost

    def stop(self) -> None:
        self.stopped = True
        if self.cannot_stop:
            raise ServerError(f"{self.name} does not end")


class FakeClient:
    def __init__(self, *_: object, **__: object) -> None:
        self.is_silent = False
        self.api_key = ""

    def reach(self, base_url: str, *, api_key: str, admin_key: str) -> None:
        self.api_key = api_key

    async def answers(self, *, deadline_s: float) -> bool:
        return not self.is_silent

    async def weight_version(self) -> str:
        return "0"

    async def close(self) -> None: ...


class FakeRouter:
    """Knows which engines it routes to."""

    made: ClassVar[list[FakeRouter]] = []

    class Address:
        def close(self) -> None: ...

    def __init__(
        self, *, address: object = None, name: str = "router", **_: object
    ) -> None:
        self.name = name
        self.address = address or self.Address()
        self.engine_api_key = None
        self.log = Path("router.log")
        self.pid = os.getpid()
        self.urls: set[str] = set()
        self.unreachable: set[str] = set()
        self.metrics_url = "http://router/metrics"
        self.is_away = False
        self.stopped = False
        self.made.append(self)

    def wait_ready(self) -> None: ...

    def answers(self, deadline_s: float) -> bool:
        return not self.is_away

    def register(self, url: str, *, api_key: str) -> None:
        if self.is_away or url in self.unreachable:
            raise ServerError(f"no route to {url}")
        self.urls.add(url)

    def registered(self, url: str) -> bool:
        return url in self.urls

    def unregister(self, url: str) -> None:
        self.urls.discard(url)

    def log_tail(self) -> str:
        return "no more lines"

    def stop(self) -> None:
        self.stopped = True


class Trainer:
    """Stages into two slots in turn, as the arena does, and takes a while to write
    one."""

    def __init__(self) -> None:
        self.slots = ["", ""]
        self.staged: list[int] = []
        self.hold: asyncio.Event | None = None

    async def layout(self) -> WeightLayout:
        return (SPEC,)

    async def stage(self, version: WeightVersion) -> StagedWeights:
        self.staged.append(version)
        slot = version % 2
        self.slots[slot] = "half written"
        if self.hold is not None:
            await self.hold.wait()
        self.slots[slot] = str(version)
        return StagedWeights(
            version=version,
            handle=str(slot),
            checksums={"w": str(version)},
            num_bytes=1,
        )

    async def logprobs(self, prompts: Sequence[Sequence[int]]):
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]


class FakeReceiver:
    """Reads the trainer's slot while it loads."""

    trainer: Trainer
    made: ClassVar[list[FakeReceiver]] = []

    def __init__(
        self, name: str, client: object, settings: WeightsConfig, *, num_ranks: int
    ) -> None:
        self.name = name
        self.deadline_s = settings.timeout_s
        self.is_paused = False
        self.weights = ""
        self.version = 0
        self.fails = ""
        self.load_waits: asyncio.Event | None = None
        self.loading = asyncio.Event()
        self.made.append(self)

    def _phase(self, phase: str) -> None:
        if self.fails == phase:
            raise WeightSyncError(f"{self.name} refuses")

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        self._phase("check")

    async def pause(self) -> None:
        self._phase("pause")
        self.is_paused = True

    async def load(self, staged: StagedWeights) -> None:
        self._phase("load")
        self.loading.set()
        if self.load_waits is not None:
            await self.load_waits.wait()
        self.weights = self.trainer.slots[int(staged.handle)]

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        return {"w": self.weights}

    async def commit(self, version: WeightVersion) -> None:
        self._phase("commit")
        self.version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def resume(self) -> None:
        self.is_paused = False

    async def logprobs(self, prompts: Sequence[Sequence[int]]):
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.001)


def receiver(fleet: Fleet, name: str) -> FakeReceiver:
    weight_receiver = fleet.engines[name].receiver
    assert isinstance(weight_receiver, FakeReceiver)
    return weight_receiver


@asynccontextmanager
async def mortal_fleet(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    tmp_path: Path,
    deaths: Deaths,
    *,
    eval_engines: int = 0,
) -> AsyncIterator[Fleet]:
    """Three engines that have started, whose watches find what `deaths` says."""
    for fake in (FakeServer, FakeRouter, FakeReceiver):
        monkeypatch.setattr(fake, "made", [])
    monkeypatch.setattr(FakeServer, "may_be_ready", threading.Event())
    monkeypatch.setattr(FakeReceiver, "trainer", Trainer(), raising=False)
    monkeypatch.setattr(engine_launcher, "EngineServer", FakeServer)
    monkeypatch.setattr(engine_launcher, "ForkParent", FakeParent)
    monkeypatch.setattr(fleet_router, "RouterServer", FakeRouter)
    monkeypatch.setattr(engine_launcher, "SglangClient", FakeClient)
    monkeypatch.setattr(engine_launcher, "RECEIVERS", {"arena": FakeReceiver})
    monkeypatch.setattr(watches, "engine_death", deaths.engine)
    monkeypatch.setattr(fleet_router, "router_death", deaths.router)
    config = EngineConfig(num_engines=3, max_restarts=2)
    fleet = Fleet(
        config,
        tiny_model,
        tmp_path,
        weights=ArenaWeights(timeout_s=900.0),
        eval_engines=eval_engines,
    )
    FakeServer.may_be_ready.set()
    await fleet.start()
    try:
        yield fleet
    finally:
        FakeServer.may_be_ready.set()
        await fleet.stop()
