"""The weight transport `collective` between processes that run the engine's loader
without SGLang."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from slow_cases import first_quick

from benchmarks.weight_updates.loader_server import LoaderServer
from invrl.engines.client.weight_receiver import BroadcastReceiver
from invrl.errors import WeightSyncError
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import StagedWeights, WeightLayout, WeightReceiver
from invrl.types.weights import TensorSpec, WeightUpdate, WeightVersion
from invrl.weights.config import ArenaWeights
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports import broadcast, joint_loads
from invrl.weights.transports.broadcast import Piece, bucket_pieces
from invrl.weights.transports.broadcast_loads import BroadcastLoads
from invrl.weights.transports.broadcaster import Broadcaster
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

TIMEOUT_S = 4.0
SETTINGS = ArenaWeights.model_validate({"timeout_s": 30 * TIMEOUT_S})
LAYOUT = tuple(
    TensorSpec(
        name=f"model.layers.{layer}.mlp.down_proj.weight",
        shape=(1001, 1500),
        dtype="float32",
    )
    for layer in range(16)
)  # six buckets; tensors begin and end within them


class Trainer:
    """Stages random tensors and sends them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.offers: list[tuple[WeightVersion, list[str]]] = []
        self.broadcaster = Broadcaster(LAYOUT, host="127.0.0.1", timeout_s=TIMEOUT_S)

    async def layout(self) -> WeightLayout:
        return LAYOUT

    async def stage(self, version: WeightVersion) -> StagedWeights:
        generator = torch.Generator().manual_seed(version)
        self.tensors = {
            spec.name: torch.rand(spec.shape, generator=generator) for spec in LAYOUT
        }
        return self.broadcaster.stage(version, self.tensors.items())

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        self.offers.append((version, [name.partition("/")[0] for name in engines]))
        return self.broadcaster.offer(version, engines)

    async def logprobs(self, prompts):
        raise NotImplementedError

    def checksums(self) -> dict[str, str]:
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}


class Fleet:
    """Loaders, each a process of its own, and the transaction over them."""

    def __init__(self, folder: Path, parent: ForkParent) -> None:
        self.trainer = Trainer()
        self.engines: list[BroadcastReceiver] = []
        self.servers: dict[str, LoaderServer] = {}
        self._folder = folder
        self._parent = parent
        self._stack = AsyncExitStack()
        self._loads = BroadcastLoads(self.trainer, timeout_s=TIMEOUT_S)
        self.transaction = WeightTransaction(
            self.trainer,
            self._receivers,
            canary_prompts=(),
            bound=CanaryBound.for_dtypes("float32"),
            deadline_s=SETTINGS.timeout_s,
            load=self._loads.load,
        )

    async def _receivers(self) -> Sequence[WeightReceiver]:
        return self.engines

    async def start(self, *names: str) -> None:
        for name in names:
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            server = LoaderServer(LAYOUT, folder, parent=self._parent)
            self.servers[name] = server
            self._stack.callback(server.stop)
        for name in names:
            self.servers[name].wait_ready(deadline_s=120)
            client = await self._stack.enter_async_context(self.servers[name].client())
            self.engines.append(BroadcastReceiver(name, client, SETTINGS))

    async def update(self, version: int) -> WeightUpdate:
        update = await self.transaction.run(WeightVersion(version))
        self.engines = [
            engine for engine in self.engines if engine.name not in update.lost_engines
        ]
        return update

    async def held(self) -> list[dict[str, str]]:
        staged = StagedWeights(
            version=WeightVersion(0), handle="", checksums={}, num_bytes=0
        )
        return [dict(await engine.checksums(staged)) for engine in self.engines]

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def fleet(tmp_path: Path, loader_parent: ForkParent) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, loader_parent)
    try:
        yield fleet
    finally:
        await fleet.close()


def test_broadcast_buckets_hold_every_byte_once() -> None:
    layout = (
        TensorSpec(
            name="model.layers.0.self_attn.o_proj.weight", shape=(50,), dtype="float32"
        ),
        TensorSpec(name="model.norm.weight", shape=(3,), dtype="bfloat16"),
    )
    first, second = (spec.name for spec in layout)
    assert bucket_pieces(layout, 100) == [
        [Piece(first, 0, 0, 100)],
        [Piece(first, 100, 0, 100)],
        [Piece(second, 0, 56, 6)],
        [],
    ]


async def test_broadcast_leaves_the_trainers_bytes_in_every_engine(
    fleet: Fleet,
) -> None:
    await fleet.start("a", "b")
    ports: set[int] = set()
    for version in range(1, 5):
        await fleet.update(version)
        assert await fleet.held() == 2 * [fleet.trainer.checksums()]
        generations = fleet.trainer.broadcaster._generations
        ports |= {generation.invitations[0].port for generation in generations}
    assert fleet.trainer.offers == [(version, ["a", "b"]) for version in range(1, 5)]
    assert len(ports) == 1, "one group lasts while its engines do"


@pytest.mark.parametrize("fault", first_quick([signal.SIGKILL, signal.SIGSTOP]))
async def test_engine_that_dies_or_hangs_in_a_broadcast_is_lost_and_other_engines_continue(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    monkeypatch.setattr(joint_loads, "_ANSWER_S", 2.0)
    await fleet.start("a", "b", "c")
    await fleet.update(1)
    victim = fleet.servers["b"].pid
    begin = broadcast.WeightGroup._begin
    sent: list[int] = []

    def deadly(group: broadcast.WeightGroup, bucket: torch.Tensor):
        sent.append(bucket.numel())
        # what is left is more than sockets hold for a process that does not read
        if len(sent) == 2:
            os.kill(victim, fault)
        return begin(group, bucket)

    monkeypatch.setattr(broadcast.WeightGroup, "_begin", deadly)
    try:
        update = await fleet.update(2)
    finally:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    assert list(update.lost_engines) == ["b"]
    reason = {
        signal.SIGKILL: "the loader",
        signal.SIGSTOP: "waited 6.0 s for b to answer",
    }[fault]
    assert reason in update.lost_engines["b"]
    assert fleet.trainer.offers[1:] == [
        (2, ["a", "b", "c"]),
        (2, ["a", "c"]),
    ]
    assert await fleet.held() == 2 * [fleet.trainer.checksums()]

    # It comes back under its name, as another process, and gets the version that the
    # fleet holds.
    fleet.servers["b"].stop()
    others = fleet.engines
    fleet.engines = []
    await fleet.start("b")
    joining_engine = fleet.engines[0]
    await fleet.transaction.bring_up(joining_engine, lambda: None)
    assert await fleet.held() == [fleet.trainer.checksums()]
    fleet.engines = [*others, joining_engine]
    await fleet.update(3)
    assert fleet.trainer.offers[3:] == [
        (2, ["b"]),
        (3, ["a", "c", "b"]),
    ]
    assert await fleet.held() == 3 * [fleet.trainer.checksums()]


@pytest.mark.slow
async def test_failed_broadcast_leaves_every_engine_on_the_old_version(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", "b")
    await fleet.update(1)
    before = fleet.trainer.checksums()
    begin = broadcast.WeightGroup._begin
    numbers = count()

    def failing(group: broadcast.WeightGroup, bucket: torch.Tensor):
        # in the middle of the broadcast, and of its repetition
        if next(numbers) in (3, 7):
            raise RuntimeError("the cable is cut")
        return begin(group, bucket)

    with monkeypatch.context() as patch:
        patch.setattr(broadcast.WeightGroup, "_begin", failing)
        with pytest.raises(WeightSyncError, match="broke twice") as raised:
            await fleet.update(2)
    assert raised.value.unrestored == ()
    assert await fleet.held() == 2 * [before]
    await fleet.update(2)
    assert await fleet.held() == 2 * [fleet.trainer.checksums()]


async def test_byte_changed_in_a_broadcast_is_found_before_the_commit(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a")
    await fleet.update(1)
    before = fleet.trainer.checksums()
    begin = broadcast.WeightGroup._begin

    def flipped(group: broadcast.WeightGroup, bucket: torch.Tensor):
        monkeypatch.setattr(broadcast.WeightGroup, "_begin", begin)
        wrong = bucket.clone()
        wrong[1000] ^= 1
        return begin(group, wrong)

    monkeypatch.setattr(broadcast.WeightGroup, "_begin", flipped)
    with pytest.raises(WeightSyncError, match="1 of 16 tensors are not what was sent"):
        await fleet.update(2)
    assert await fleet.held() == [before]
