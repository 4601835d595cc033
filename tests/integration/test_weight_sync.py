"""Weight updates into a live engine: whole and proved; and what must trip. With
requests in flight: `test_updates_in_flight.py`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from pool_sender import PoolSender, folder_checksums
from rank_pool import RankPool
from slow_cases import first_quick
from torch_trainer import Tensors, TorchSender
from torch_updates import CANARY, FP32, Update, receivers_of
from train_reference import random_batch

from invrl.engines.client.weight_receiver import (
    ArenaReceiver,
    BroadcastReceiver,
    BucketReceiver,
    DeltaReceiver,
    EngineReceiver,
    FolderReceiver,
)
from invrl.engines.fleet.fleet import Fleet
from invrl.errors import CanaryError, ChecksumError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.weights import WeightVersion
from invrl.weights.config import ArenaWeights, DeltaWeights
from invrl.weights.transports.arena import ArenaHandle
from invrl.weights.transports.broadcast_loads import BroadcastLoads
from invrl.weights.transports.bucket_loads import BucketLoads
from invrl.weights.transports.delta_folder import DELTA_NAME, DeltaHandle
from invrl.weights.transports.file_server import WeightFileServer
from invrl.weights.transports.weight_files import FileSource, ServedHandle
from invrl.weights.update.transaction import WeightTransaction


@pytest.fixture
def receiver(tiny_fleet: Fleet) -> EngineReceiver:
    return tiny_fleet.engines["engine-0"].receiver


@pytest.fixture
async def update(tiny_model: Path, receiver: EngineReceiver) -> Update:
    """A trainer whose first weights the engine holds."""
    update = Update(TorchSender(tiny_model), [receiver])
    await update.run()
    return update


def held(receiver: EngineReceiver):
    staged = StagedWeights(
        version=WeightVersion(0), handle="", checksums={}, num_bytes=0
    )
    return receiver.checksums(staged)


async def test_engine_holds_the_trainers_bytes_after_twenty_updates(
    update: Update, receiver: EngineReceiver
) -> None:
    for seed in range(20):
        update.sender.train(seed)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
    assert await held(receiver) == update.sender.checksums()
    assert outcome.lost_engines == {}


async def test_buckets_carry_the_trainers_bytes(
    tiny_model: Path, tiny_fleet: Fleet, receiver: EngineReceiver
) -> None:
    sender = TorchSender(tiny_model, transport="bucket")
    bucket = BucketReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [bucket])
    for seed in range(3):
        sender.train(seed)
        await update.run()
    staged = await sender.stage(WeightVersion(99))
    assert len(json.loads(staged.handle)["payloads"]) > 3
    assert await held(bucket) == sender.checksums()


async def test_buckets_come_from_the_trainer_and_what_is_staged_leads_back(
    tiny_model: Path, tiny_fleet: Fleet
) -> None:
    """As on a GPU, with the memory of a CPU: the engine takes the trainer's parameters
    bucket by bucket, and after a failure the version before."""
    sender = TorchSender(tiny_model, transport="bucket", device=torch.device("cpu"))
    receiver = BucketReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [receiver], BucketLoads(sender, timeout_s=10.0).load)
    for seed in range(2):
        sender.train(seed)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
        assert await held(receiver) == sender.sums()
    num_buckets = len(sender.buckets_sent) // 2
    assert sender.buckets_sent == 2 * list(range(num_buckets))
    held_before = await held(receiver)
    sender.train(3)
    sender.spoil = lambda staged: dataclasses.replace(staged, checksums=held_before)
    with pytest.raises(ChecksumError, match="25 of 25"):
        await update.run()
    assert sender.buckets_sent == 3 * list(range(num_buckets))
    assert await held(receiver) == held_before


async def test_folders_carry_the_trainers_bytes_and_damaged_folders_are_refused(
    tiny_model: Path, tiny_fleet: Fleet, tmp_path: Path
) -> None:
    """Each fault leaves the engine with the old version, which it serves."""
    sender = TorchSender(tiny_model, weight_folder=tmp_path / "weights")
    receiver = FolderReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [receiver])
    for seed in range(3):
        sender.train(seed)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
    held_before = await held(receiver)
    assert held_before == sender.checksums()

    def cut(file: bytes) -> bytes:
        return file[:-100]

    def flip(file: bytes) -> bytes:
        return file[:-100] + bytes([file[-100] ^ 1]) + file[-99:]

    sender.train(4)
    for damage, error in (
        (cut, "cannot be read"),
        (flip, "1 of 25"),
        (lambda _: b"", "cannot be read"),
    ):

        def spoil(
            staged: StagedWeights, damage: Callable[[bytes], bytes] = damage
        ) -> StagedWeights:
            path = Path(staged.handle) / "model.safetensors"
            path.write_bytes(damage(path.read_bytes()))
            return staged

        sender.spoil = spoil
        with pytest.raises(WeightSyncError, match=error) as raised:
            await update.run()
        assert raised.value.unrestored == ()
        assert await held(receiver) == held_before
    sender.spoil = lambda staged: staged
    await update.run()
    assert await held(receiver) == sender.checksums()


async def test_broadcast_carries_the_trainers_bytes_and_a_wrong_byte_is_found(
    tiny_model: Path, tiny_fleet: Fleet
) -> None:
    """With a failure the engine goes back to the old version, by another broadcast."""
    sender = TorchSender(tiny_model, transport="collective")
    receiver = BroadcastReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [receiver], BroadcastLoads(sender, timeout_s=10.0).load)
    for seed in range(3):
        sender.train(seed)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
        assert await held(receiver) == sender.checksums()
    held_before = sender.checksums()
    sender.train(4)
    sender.spoil = lambda staged: dataclasses.replace(staged, checksums=held_before)
    with pytest.raises(ChecksumError, match="25 of 25"):
        await update.run()
    assert await held(receiver) == held_before
    assert await receiver.logprobs(CANARY)


async def test_engine_applies_deltas_and_loads_whole_weights_if_its_base_differs(
    tiny_model: Path, tiny_fleet: Fleet, receiver: EngineReceiver, tmp_path: Path
) -> None:
    """Each fault leaves the engine with the old version, which it serves."""
    sender = TorchSender(
        tiny_model, transport="delta", weight_folder=tmp_path / "weights"
    )
    follower = DeltaReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [follower])
    sizes: list[int] = []
    for seed in range(6):  # whole, three differences, whole, a difference
        sender.train(seed, size=1e-7)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
        assert await held(follower) == sender.checksums()
        sizes.append(outcome.num_bytes)
    assert max(sizes[1:4] + sizes[5:]) < 0.5 * min(sizes[0], sizes[4])

    # another trainer, another base
    await Update(TorchSender(tiny_model), [receiver]).run()
    sender.train(6, size=1e-7)
    await update.run()
    held_before = await held(follower)
    assert held_before == sender.checksums()

    def flip(staged: StagedWeights) -> StagedWeights:
        chain = msgspec.json.decode(staged.handle, type=DeltaHandle).chain
        path = Path(chain[-1]) / DELTA_NAME
        body = path.read_bytes()
        path.write_bytes(body[:-100] + bytes([body[-100] ^ 1]) + body[-99:])
        return staged

    sender.spoil = flip
    sender.train(7, size=1e-7)
    with pytest.raises(
        WeightSyncError, match=r"cannot be read|does not lead to"
    ) as raised:
        await update.run()
    assert raised.value.unrestored == ()
    assert await held(follower) == held_before
    sender.spoil = lambda staged: staged
    await update.run()
    assert await held(follower) == sender.checksums()


async def test_engine_fetches_deltas_from_the_trainer(
    tiny_model: Path, tiny_fleet: Fleet, receiver: EngineReceiver, tmp_path: Path
) -> None:
    """A trainer that is not reached leaves the engine with the old version, which it
    serves."""
    folder = tmp_path / "weights"
    sender = TorchSender(tiny_model, transport="delta", weight_folder=folder)
    settings = DeltaWeights(host="127.0.0.1", timeout_s=60.0)
    follower = DeltaReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, settings
    )
    update = Update(sender, [follower])
    server = WeightFileServer(folder, "127.0.0.1")

    def serve(staged: StagedWeights) -> StagedWeights:
        return dataclasses.replace(staged, handle=server.served(staged.handle))

    sender.spoil = serve
    for seed in range(3):
        sender.train(seed, size=1e-7)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
        assert await held(follower) == sender.checksums()
    # another trainer, another base
    await Update(TorchSender(tiny_model), [receiver]).run()
    sender.train(3, size=1e-7)
    await update.run()
    held_before = await held(follower)
    assert held_before == sender.checksums()

    def lose(staged: StagedWeights) -> StagedWeights:
        source = FileSource(url="http://127.0.0.1:9", key="x")
        return dataclasses.replace(
            staged, handle=encode(ServedHandle(source=source, handle=staged.handle))
        )

    sender.spoil = lose
    sender.train(4, size=1e-7)
    with pytest.raises(
        WeightSyncError, match=r"not fetched from http://127\.0\.0\.1:9"
    ) as raised:
        await update.run()
    assert raised.value.unrestored == ()
    assert await held(follower) == held_before
    sender.spoil = serve
    await update.run()
    assert await held(follower) == sender.checksums()
    server.close()


@pytest.mark.parametrize(
    "layout",
    first_quick([ParallelLayout(tensor=2), ParallelLayout()]),
    ids=["tp2", "one"],
)
async def test_engine_fetches_deltas_from_a_trainer_rank(
    pool: RankPool,
    tiny_model: Path,
    tiny_fleet: Fleet,
    tmp_path: Path,
    layout: ParallelLayout,
) -> None:
    settings = DeltaWeights(full_every=4, host="127.0.0.1")
    trainer = pool.build(
        tiny_model,
        layout=layout,
        train=TrainConfig(train_dtype="float32", lr=1e-5),
        weights={"weights": settings, "weight_folder": str(tmp_path / "weights")},
    )
    follower = DeltaReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, settings
    )
    transaction = WeightTransaction(
        PoolSender(trainer), receivers_of(follower), canary_prompts=CANARY, bound=FP32
    )
    for seed in range(5):  # whole, three differences, whole
        trainer.train(random_batch(seed))
        Update.version = WeightVersion(Update.version + 1)
        await transaction.run(Update.version)
        export = tmp_path / f"export-{seed}"
        trainer.part(layout.replica(0)).each("export", str(export))
        assert await held(follower) == folder_checksums(export)


def encode(handle: ServedHandle) -> str:
    return msgspec.json.encode(handle).decode()


async def test_engine_that_aliases_the_arena_serves_the_staged_weights(
    tiny_model: Path, tiny_fleet: Fleet
) -> None:
    """Also after a failed update: it goes back to the slot before."""
    sender = TorchSender(tiny_model)
    settings = ArenaWeights(arena_mode="alias")
    aliasing = ArenaReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, settings
    )
    update = Update(sender, [aliasing])
    for seed in range(3):
        sender.train(seed)
        outcome = await update.run()
        assert outcome.canary_max_gap <= 1e-3
    held_before = await held(aliasing)
    assert held_before == sender.checksums()
    sender.train(4)
    sender.spoil = lambda staged: dataclasses.replace(staged, checksums=held_before)
    with pytest.raises(ChecksumError, match="25 of 25"):
        await update.run()
    assert await held(aliasing) == held_before
    sender.spoil = lambda staged: staged
    outcome = await update.run()
    assert outcome.canary_max_gap <= 1e-3
    assert await held(aliasing) == sender.checksums()


@pytest.mark.parametrize(
    "layout",
    first_quick(
        [
            ParallelLayout(tensor=2, pipeline=2),
            ParallelLayout(tensor=2),
            ParallelLayout(pipeline=2),
            ParallelLayout(context=2),
            ParallelLayout(data=2),
        ]
    ),
    ids=["tp2pp2", "tp2", "pp2", "cp2", "dp2"],
)
async def test_engine_holds_the_exported_bytes_after_three_updates_of_any_layout(
    pool: RankPool,
    tiny_model: Path,
    receiver: EngineReceiver,
    tmp_path: Path,
    layout: ParallelLayout,
) -> None:
    """The canary proves that these are the weights that the ranks trained."""
    trainer = pool.build(
        tiny_model, layout=layout, train=TrainConfig(train_dtype="float32", lr=5e-3)
    )
    transaction = WeightTransaction(
        PoolSender(trainer), receivers_of(receiver), canary_prompts=CANARY, bound=FP32
    )
    for seed in range(3):
        trainer.train(random_batch(seed))
        Update.version = WeightVersion(Update.version + 1)
        update = await transaction.run(Update.version)
        assert update.canary_max_gap <= 1e-4
    trainer.part(layout.replica(0)).each("export", str(tmp_path / "export"))
    assert await held(receiver) == folder_checksums(tmp_path / "export")


class TestRefusedBeforeAByteMoved:
    @pytest.mark.parametrize(
        "fault", ["shape", "name", "dtype", "missing", "twice_as_long"]
    )
    async def test_wrong_layout_is_refused_and_the_engine_keeps_its_weights(
        self, fault: str, update: Update, tiny_model: Path, receiver: EngineReceiver
    ) -> None:
        before = await held(receiver)
        wrong = TorchSender(tiny_model)
        specs = list(wrong.tensors)
        at = next(i for i, spec in enumerate(specs) if "o_proj" in spec.name)
        changed = {
            "shape": dataclasses.replace(specs[at], shape=(32, 64)),
            "twice_as_long": dataclasses.replace(specs[at], shape=(128, 64)),
            "name": dataclasses.replace(
                specs[at], name="model.layers.7.self_attn.o_proj.weight"
            ),
            "dtype": dataclasses.replace(specs[at], dtype="bfloat16"),
        }
        specs[at : at + 1] = [changed[fault]] if fault in changed else []
        staging = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in specs
        }
        from invrl.weights.transports.arena import ArenaWriter

        wrong.tensors = tuple(specs)
        wrong._writer = ArenaWriter(wrong.tensors)
        wrong.mistake = lambda _: staging
        with pytest.raises(LayoutError, match=r"o_proj"):
            await Update(wrong, [receiver]).run()
        assert await held(receiver) == before
        assert await receiver.logprobs(CANARY)


def swap_q_and_k(tensors: Tensors) -> Tensors:
    return {
        name: tensors[
            name.replace("q_proj", "k_proj")
            if "q_proj" in name
            else name.replace("k_proj", "q_proj")
        ]
        for name in tensors
    }


class Skipping(ArenaReceiver):
    """An engine that says it loaded."""

    skip = True

    async def load(self, staged: StagedWeights) -> None:
        if self.skip:
            self.skip = False
            return
        await super().load(staged)


class Dropping(BucketReceiver):
    """A transport that loses one bucket."""

    drop = True

    async def load(self, staged: StagedWeights) -> None:
        handle = json.loads(staged.handle)
        if self.drop:
            self.drop = False
            del handle["payloads"][1]
        await super().load(dataclasses.replace(staged, handle=json.dumps(handle)))


class TestMutationsTrip:
    async def test_q_and_k_swapped_by_the_trainer_are_found_by_the_canary(
        self, update: Update
    ) -> None:
        update.sender.train(1)
        update.sender.mistake = swap_q_and_k
        with pytest.raises(CanaryError, match="another model"):
            await update.run()
        update.sender.mistake = lambda tensors: tensors
        Update.version += 1
        await update.run()

    async def test_q_and_k_swapped_in_transport_are_found_by_the_checksum(
        self, update: Update, receiver: EngineReceiver
    ) -> None:
        before = update.sender.checksums()
        update.sender.train(2)

        def swapped(staged: StagedWeights) -> StagedWeights:
            handle = msgspec.json.decode(staged.handle, type=ArenaHandle)
            views = update.sender._writer._slots[handle.slot]  # type: ignore[union-attr]
            q, k = (
                views[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk"
            )
            q_bytes = q.clone()
            q.copy_(k)
            k.copy_(q_bytes)
            return staged

        update.sender.spoil = swapped
        with pytest.raises(ChecksumError, match="2 of 25"):
            await update.run()
        assert await held(receiver) == before  # the old weights are back
        assert await receiver.logprobs(CANARY)

    async def test_skipped_update_is_found_by_the_checksum(
        self, update: Update, tiny_fleet: Fleet
    ) -> None:
        skipping = Skipping(
            "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
        )
        other = Update(update.sender, [skipping])
        update.sender.train(3)
        with pytest.raises(ChecksumError, match="25 of 25") as raised:
            await other.run()
        # no weights were staged before by this transaction: nothing to go back to
        assert raised.value.unrestored == ("engine-0",)
        await skipping.resume()
        await update.run()

    async def test_dropped_bucket_is_found_by_the_checksum(
        self, tiny_model: Path, tiny_fleet: Fleet
    ) -> None:
        sender = TorchSender(tiny_model, transport="bucket")
        dropping = Dropping(
            "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
        )
        dropping.drop = False
        update = Update(sender, [dropping])
        await update.run()
        before = sender.checksums()
        sender.train(4)
        dropping.drop = True
        with pytest.raises(ChecksumError) as raised:
            await update.run()
        assert raised.value.unrestored == ()
        assert await held(dropping) == before
        await update.run()
        assert await held(dropping) == sender.checksums()


async def test_missing_arena_is_an_error_and_the_engine_lives(
    update: Update, receiver: EngineReceiver
) -> None:
    staged = await update.sender.stage(WeightVersion(1))
    lost = dataclasses.replace(
        staged, handle='{"path":"/proc/1/fd/9999","inode":1,"slot":0}'
    )
    layout = await update.sender.layout()
    with pytest.raises(
        WeightSyncError, match="cannot be opened"
    ):  # before anything is paused
        await receiver.check(layout, lost)
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        await receiver.load(lost)
    assert await receiver.logprobs(CANARY)


async def test_engines_load_the_same_staged_buckets_again_and_again(
    tiny_model: Path, tiny_fleet: Fleet
) -> None:
    """Torch removes shared memory when it has been opened as often as it was sent."""
    sender = TorchSender(tiny_model, transport="bucket")
    receiver = BucketReceiver(
        "engine-0", tiny_fleet.engines["engine-0"].client, ArenaWeights()
    )
    update = Update(sender, [receiver])
    sender.train(1)
    await update.run()
    committed = update.transaction.committed
    assert committed is not None
    await receiver.pause()
    for _ in range(4):
        await receiver.load(committed.staged)
    assert await receiver.checksums(committed.staged) == sender.checksums()
    await receiver.resume()
