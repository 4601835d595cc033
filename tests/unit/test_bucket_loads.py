"""Loads of the transport `bucket` from a trainer that holds the version on its GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from unittest import mock

import msgspec
import pytest
import torch

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightUpdate, WeightVersion
from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.transports import buckets, joint_loads
from invrl.weights.transports.bucket_loads import BucketLoads
from invrl.weights.transports.buckets import BucketHandle, BucketSender, bucket_names
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

NUM_BUCKETS = 3
LAYOUT = tuple(
    TensorSpec(name=f"layer.{index}", shape=(4, 3), dtype="float32")
    for index in range(NUM_BUCKETS)
)
"""A tensor for each bucket."""


class Trainer:
    """A bucket is named by its source, its version and its index; the payloads of one
    on the GPU also by their number."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.given: list[str] = []
        self.unread: list[str] = []
        """Payloads of the last bucket that no engine has opened."""
        self.on_gpu = True
        self.before: Callable[[int], None] = lambda index: None

    async def layout(self) -> WeightLayout:
        return LAYOUT

    async def stage(self, version: WeightVersion) -> StagedWeights:
        self.version = version
        handle = BucketHandle(
            payloads=[f"host {version} {index}" for index in range(NUM_BUCKETS)],
            trainer_has_more=self.on_gpu,
        )
        return StagedWeights(
            version=version,
            handle=msgspec.json.encode(handle).decode(),
            checksums={spec.name: str(version) for spec in LAYOUT},
            num_bytes=1,
        )

    def holds(self, version: WeightVersion) -> bool:
        return self.version == version

    async def bucket(self, index: int, copies: int) -> list[str]:
        self.before(index)
        bucket = f"gpu {self.version} {index}"
        self.given.append(bucket)
        first = len(self.given) * 100
        self.unread = [f"{bucket} {first + copy}" for copy in range(copies)]
        return list(self.unread)

    async def logprobs(self, prompts):
        raise NotImplementedError


class Engine:
    """Holds a version of each tensor."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name = name
        self.trainer = trainer
        self.held: dict[str, str] = {}
        self.loaded: list[str] = []
        self.buckets_of_requests: list[int] = []
        self.is_in_update = False
        self.fault: Callable[[str], None] = lambda payload: None
        self.hangs_at = ""

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None: ...
    async def pause(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def commit(self, version: WeightVersion) -> None: ...
    async def resume(self) -> None: ...

    async def load(self, staged: StagedWeights) -> None:
        handle = msgspec.json.decode(staged.handle, type=BucketHandle)
        assert handle.begins or self.is_in_update
        self.is_in_update = True
        self.buckets_of_requests.append(len(handle.payloads))
        for payload in handle.payloads:
            await asyncio.sleep(0)
            source, version, index, *_ = payload.split()
            bucket = f"{source} {version} {index}"
            self.fault(bucket)
            if bucket == self.hangs_at:
                await asyncio.Event().wait()
            if source == "gpu":  # freed with the next bucket; torch counts its readers
                assert payload in self.trainer.unread
                self.trainer.unread.remove(payload)
            self.held[LAYOUT[int(index)].name] = version
            self.loaded.append(bucket)
        self.is_in_update = not handle.ends

    async def checksums(self, staged: StagedWeights) -> dict[str, str]:
        assert not self.is_in_update
        return dict(self.held)

    async def logprobs(self, prompts):
        raise NotImplementedError


class Fleet:
    def __init__(self, *names: str) -> None:
        self.trainer = Trainer()
        self.engines = [Engine(name, self.trainer) for name in names]
        self.transaction = WeightTransaction(
            self.trainer,
            self._receivers,
            canary_prompts=(),
            bound=CanaryBound.for_dtypes("float32"),
            load=BucketLoads(self.trainer, timeout_s=0.0).load,
        )

    async def _receivers(self) -> Sequence[Engine]:
        return self.engines

    async def update(self, version: int) -> WeightUpdate:
        return await self.transaction.run(WeightVersion(version))

    def versions(self) -> list[set[str]]:
        """Return the versions that each engine holds parts of."""
        return [set(engine.held.values()) for engine in self.engines]


def from_gpu(version: int) -> list[str]:
    return [f"gpu {version} {index}" for index in range(NUM_BUCKETS)]


def from_host(version: int) -> list[str]:
    return [f"host {version} {index}" for index in range(NUM_BUCKETS)]


def failing_at(bucket: str) -> Callable[[str], None]:
    def fail(payload: str) -> None:
        if payload == bucket:
            raise WeightSyncError("the engine has failed")

    return fail


async def test_engines_of_an_update_share_each_bucket_of_the_trainer() -> None:
    fleet = Fleet("a", "b")
    for version in (1, 2):
        await fleet.update(version)
        assert fleet.versions() == 2 * [{str(version)}]
    assert fleet.trainer.given == from_gpu(1) + from_gpu(2)
    assert fleet.engines[0].loaded == fleet.trainer.given


async def test_engine_that_fails_in_the_middle_is_lost_and_the_others_go_on() -> None:
    fleet = Fleet("a", "b")
    await fleet.update(1)
    fleet.engines[1].fault = failing_at("gpu 2 1")
    update = await fleet.update(2)
    assert list(update.lost_engines) == ["b"]
    assert fleet.versions() == [{"2"}, {"1", "2"}]
    assert fleet.engines[1].loaded[-1] == "gpu 2 0"


async def test_silent_engine_is_given_up_and_the_others_go_on() -> None:
    fleet = Fleet("a", "b")
    await fleet.update(1)
    fleet.engines[1].hangs_at = "gpu 2 1"
    with mock.patch.object(joint_loads, "_ANSWER_S", 0.01):
        update = await fleet.update(2)
    assert "b to answer" in update.lost_engines["b"]
    assert fleet.versions()[0] == {"2"}


async def test_engines_go_back_by_what_is_staged_in_the_host() -> None:
    fleet = Fleet("a", "b")
    await fleet.update(1)
    for engine in fleet.engines:
        engine.fault = failing_at("gpu 2 2")
    with pytest.raises(WeightSyncError, match="has failed") as raised:
        await fleet.update(2)
    assert raised.value.unrestored == ()
    assert fleet.versions() == 2 * [{"1"}]
    assert fleet.engines[0].loaded[-NUM_BUCKETS:] == from_host(1)


async def test_bucket_that_the_trainer_cannot_give_ends_the_update() -> None:
    fleet = Fleet("a")
    await fleet.update(1)

    def fail(index: int) -> None:
        if index == 1:
            raise WeightSyncError("out of memory")

    fleet.trainer.before = fail
    with pytest.raises(WeightSyncError, match="out of memory"):
        await fleet.update(2)
    assert fleet.versions() == [{"1"}]


async def test_engine_that_joins_while_the_trainer_trains_loads_what_is_staged() -> (
    None
):
    """It begins again: a mix of the version's buckets would be whole, too, but its
    parameters may have been written by a bucket of the step."""
    fleet = Fleet("a")
    await fleet.update(1)
    joining = Engine("b", fleet.trainer)

    def train(index: int) -> None:
        fleet.trainer.before = lambda index: None

        def after_bucket(payload: str) -> None:
            fleet.trainer.version = None

        joining.fault = after_bucket

    fleet.trainer.before = train
    await fleet.transaction.bring_up(joining, lambda: None)
    assert joining.loaded == ["gpu 1 0", *from_host(1)]


async def test_trainer_without_a_gpu_is_asked_for_no_bucket() -> None:
    fleet = Fleet("a", "b")
    fleet.trainer.on_gpu = False
    await fleet.update(1)
    assert fleet.trainer.given == []
    assert fleet.engines[1].loaded == from_host(1)


async def test_bucket_lives_until_its_readers_reply_whichever_load_they_are_of() -> (
    None
):
    trainer = Trainer()
    loads = BucketLoads(trainer, timeout_s=0.0)
    staged = await trainer.stage(WeightVersion(1))
    first, second = Engine("a", trainer), Engine("b", trainer)
    update = asyncio.create_task(loads.load(first, staged))
    while not trainer.given:
        await asyncio.sleep(0)
    await asyncio.gather(update, loads.load(second, staged))
    assert first.loaded == second.loaded == from_gpu(1)
    assert len(trainer.given) == 2 * NUM_BUCKETS


async def test_load_that_waits_for_a_bucket_in_use_may_end_before_it_gets_one() -> None:
    trainer = Trainer()
    loads = BucketLoads(trainer, timeout_s=0.0)
    staged = await trainer.stage(WeightVersion(1))
    hung, late = Engine("a", trainer), Engine("b", trainer)
    hung.hangs_at = "gpu 1 0"
    first = asyncio.create_task(loads.load(hung, staged))
    while not trainer.given:
        await asyncio.sleep(0)
    second = asyncio.create_task(loads.load(late, staged))
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    await asyncio.wait({first, second})
    await loads.load(late, staged)
    assert trainer.given == ["gpu 1 0", *from_gpu(1)]


async def test_silence_is_judged_by_one_bucket_also_of_what_is_staged() -> None:
    fleet = Fleet("a", "b")
    fleet.trainer.on_gpu = False
    await fleet.update(1)
    for engine in fleet.engines:
        assert engine.buckets_of_requests == NUM_BUCKETS * [1]


def serialised(bucket: buckets._Bucket, memory: torch.Tensor) -> str:
    tensors = bucket.views(memory)
    return msgspec.json.encode(
        {name: tensor.tolist() for name, tensor in tensors.items()}
    ).decode()


@pytest.fixture
def readable_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own need SGLang."""
    monkeypatch.setattr(buckets._Bucket, "serialise", serialised)


@pytest.mark.usefixtures("readable_payloads")
def test_bucket_of_the_trainer_is_the_staged_one() -> None:
    tensors = {spec.name: torch.rand(spec.shape) for spec in LAYOUT}
    sender = BucketSender(LAYOUT, bucket_bytes=90, device=torch.device("cpu"))
    staged = sender.stage(WeightVersion(1), reversed(tensors.items()))
    assert staged.checksums == whole_checksums(tensors)
    views = sender._slots[0].views
    assert [torch.equal(views[name], tensors[name]) for name in tensors] == 3 * [True]
    given: list[dict[str, object]] = []
    for index, names in enumerate(bucket_names(LAYOUT, 90)):
        [payload] = sender.bucket(index, [(name, tensors[name]) for name in names])
        given.append(msgspec.json.decode(payload))
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    assert given[0] | given[1] == values
    assert [len(bucket) for bucket in given] == [2, 1]


@pytest.mark.usefixtures("readable_payloads")
def test_bucket_without_one_of_its_tensors_is_refused() -> None:
    sender = BucketSender(LAYOUT, bucket_bytes=90, device=torch.device("cpu"))
    first = LAYOUT[0]
    with pytest.raises(LayoutError, match="bucket 0 lacks 1"):
        sender.bucket(0, [(first.name, torch.rand(first.shape))])


@pytest.mark.usefixtures("readable_payloads")
def test_bucket_on_a_gpu_is_exported_once_for_each_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch counts one reader for each export."""
    calls: list[str] = []

    def export(bucket: buckets._Bucket, memory: torch.Tensor) -> str:
        calls.append("export")
        return f"export {len(calls)}"

    monkeypatch.setattr(buckets._Bucket, "serialise", export)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("collect"))
    host_memory = BucketSender._gpu_memory
    sender = BucketSender(LAYOUT, device=torch.device("cpu"))

    def gpu_memory() -> torch.Tensor:
        sender._device = torch.device("cpu")
        memory = host_memory(sender)
        sender._device = torch.device("cuda")
        return memory

    monkeypatch.setattr(sender, "_gpu_memory", gpu_memory)
    sender._device = torch.device("cuda")
    assert sender.bucket(0, filled(1), 2) == ["export 2", "export 3"]
    sender.bucket(0, filled(2), 1)
    assert calls == ["collect", "export", "export", "collect", "export"]


def filled(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, torch.full(spec.shape, float(value))) for spec in LAYOUT]


def held_values(sender: BucketSender) -> list[set[float]]:
    """Return the values in each slot."""
    return [
        {float(view.flatten()[0]) for view in sender._slots[number].views.values()}
        for number in sorted(sender._slots)
    ]


@pytest.mark.usefixtures("readable_payloads")
def test_version_before_stays_whole_when_one_is_staged_again_or_cannot_be() -> None:
    sender = BucketSender(LAYOUT)
    sender.stage(WeightVersion(1), filled(1))
    sender.stage(WeightVersion(2), filled(2))
    sender.stage(WeightVersion(2), filled(2.5))
    assert held_values(sender) == [{1}, {2.5}]
    with pytest.raises(LayoutError, match="not those of the layout"):
        sender.stage(WeightVersion(3), filled(3)[1:])
    assert held_values(sender)[1] == {2.5}
    sender.stage(WeightVersion(3), filled(3))
    assert held_values(sender) == [{3}, {2.5}]
