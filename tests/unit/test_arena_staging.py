"""Ranks that write a slot of the arena together: parts in their places, and what is
missing. With Megatron's ranks: `test_weight_sync.py`."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Mapping
from threading import Thread
from types import SimpleNamespace

import msgspec
import pytest
import torch
from shared_gpu_memory import GPU, use_shared_memory

from invrl.errors import LayoutError, WeightSyncError
from invrl.train.weights import arena_staging
from invrl.train.weights.arena_staging import (
    check_covered,
    shares,
    stage_first,
    stage_other,
    write_parts,
)
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums.checksums import xxh3_checksums
from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.tensors.tensor_slice import TensorPart
from invrl.weights.tensors.tensor_spec import checksum, num_bytes
from invrl.weights.transports.arena import (
    ArenaHandle,
    ArenaWriter,
    map_arena,
    open_arena,
)
from invrl.weights.transports.slot_lease import SlotLease

LAYOUT = (
    TensorSpec(name="rows", shape=(6, 4), dtype="float32"),
    TensorSpec(name="columns", shape=(4, 6), dtype="float32"),
    TensorSpec(name="whole", shape=(5,), dtype="bfloat16"),
    TensorSpec(name="scalar", shape=(), dtype="float32"),
)
VERSION = WeightVersion(1)


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(
            getattr(torch, spec.dtype)
        )
        for spec in LAYOUT
    }


def parts_of(rank: int) -> list[TensorPart]:
    """Of two ranks; the second has what is not divided."""
    tensors = model()
    rows = tensors["rows"][3 * rank : 3 * rank + 3]
    columns = tensors["columns"][:, 3 * rank : 3 * rank + 3]
    parts = [
        TensorPart(name="rows", values=rows, start=3 * rank),
        TensorPart(name="columns", values=columns, dimension=1, start=3 * rank),
    ]
    if rank == 1:
        parts.append(TensorPart(name="whole", values=tensors["whole"]))
        parts.append(TensorPart(name="scalar", values=tensors["scalar"]))
    return parts


class Wire:
    """What two ranks send one another, where each waits in a thread of its own for the
    other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queues = {name: queue.Queue() for name in ("first", "other")}
        monkeypatch.setattr(arena_staging, "_send", self._send)
        monkeypatch.setattr(arena_staging, "_receive", self._receive)

    def _send(self, value: object, rank: int) -> None:
        self._queues["first" if rank == 0 else "other"].put(value)

    def _receive(self, rank: int) -> object:
        return self._queues["other" if rank == 0 else "first"].get(timeout=30.0)


def test_two_ranks_write_one_slot_and_divide_its_hashing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Wire(monkeypatch)
    hashed: dict[str, list[str]] = {"first": [], "other": []}
    writer = ArenaWriter(LAYOUT)

    def noted(rank: str):
        def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
            hashed[rank] += tensors
            return xxh3_checksums(tensors)

        return hash_tensors

    writer.hash_tensors = noted("first")
    other = Thread(target=stage_other, args=(LAYOUT, parts_of(1), 0, noted("other")))
    other.start()
    staged = stage_first(writer, VERSION, LAYOUT, parts_of(0), [1])
    other.join(30.0)
    assert dict(staged.checksums) == {
        name: checksum(tensor) for name, tensor in model().items()
    }
    place = msgspec.json.decode(staged.handle, type=ArenaHandle)
    slot = map_arena(place.path, LAYOUT)[place.slot]
    assert all(torch.equal(slot[name], tensor) for name, tensor in model().items())
    assert hashed["first"]
    assert hashed["other"]
    assert sorted(hashed["first"] + hashed["other"]) == sorted(model())
    with SlotLease(place.path, place.slot, writes=False):  # it was given back
        pass


def test_two_ranks_write_one_arena_in_the_memory_of_the_first_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Wire(monkeypatch)
    opened = use_shared_memory(monkeypatch)
    waited: list[object] = []
    monkeypatch.setattr(
        arena_staging, "_wait_for_copies", lambda slot: waited.append(set(slot))
    )
    writer = ArenaWriter(LAYOUT, device=GPU)
    other = Thread(
        target=stage_other, args=(LAYOUT, parts_of(1), 0, writer.hash_tensors)
    )
    other.start()
    staged = stage_first(writer, VERSION, LAYOUT, parts_of(0), [1])
    other.join(30.0)
    place = msgspec.json.decode(staged.handle, type=ArenaHandle)
    assert opened == [place.cuda]
    assert waited == [set(model())] * 2
    assert staged.checksums == whole_checksums(model())
    slot = open_arena(place, LAYOUT)[place.slot]
    assert all(torch.equal(slot[name], tensor) for name, tensor in model().items())


def test_rank_waits_for_its_own_gpu_and_for_that_of_the_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu=None: waited.append(gpu))
    on_another = SimpleNamespace(device=torch.device("cuda", 1), is_cuda=True)
    on_host = SimpleNamespace(device=torch.device("cpu"), is_cuda=False)
    arena_staging._wait_for_copies({"a": on_another, "b": on_another, "c": on_host})  # type: ignore[dict-item]
    assert waited == [None, torch.device("cuda", 1)]


def test_slot_with_an_unwritten_part_is_named_and_not_staged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = ArenaWriter(LAYOUT)
    first = writer.stage(VERSION, model().items())
    monkeypatch.setattr(arena_staging, "_send", lambda value, rank: None)
    monkeypatch.setattr(arena_staging, "_receive", lambda rank: {})
    with pytest.raises(
        LayoutError, match="rows: the ranks wrote 12 of its 24 elements"
    ):
        stage_first(writer, WeightVersion(2), LAYOUT, parts_of(0), [1])
    again = writer.stage(WeightVersion(2), model().items())
    assert again.handle != first.handle  # the slot of the version before was kept


def test_slot_with_one_element_too_many_or_too_few_is_refused() -> None:
    whole = {spec.name: torch.zeros(spec.shape).numel() for spec in LAYOUT}
    check_covered(LAYOUT, [whole])
    for size in (4, 6):
        with pytest.raises(
            LayoutError, match=f"whole: the ranks wrote {size} of its 5"
        ):
            check_covered(LAYOUT, [whole | {"whole": 4}, {"whole": size - 4}])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (TensorPart(name="x", values=torch.zeros(1)), "x: not in the layout"),
        (TensorPart(name="rows", values=torch.zeros(3, 4), start=4), "ends beyond"),
        (TensorPart(name="rows", values=torch.zeros(3, 5)), "no part of"),
        (TensorPart(name="whole", values=torch.zeros(5)), "no part of"),
        (
            TensorPart(name="columns", values=torch.zeros(3, 6), dimension=1),
            "no part of",
        ),
    ],
)
def test_part_that_does_not_fit_its_tensor_is_refused(
    part: TensorPart, reason: str
) -> None:
    with (
        ArenaWriter(LAYOUT).writing(VERSION) as (_, slot),
        pytest.raises(LayoutError, match=reason),
    ):
        write_parts(slot, [part])


def test_written_part_is_freed_at_once() -> None:
    """So a rank has the memory of one converted parameter at a time."""
    earlier: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def parts() -> Iterator[TensorPart]:
        for start in range(6):
            values = torch.full((1, 4), float(start))
            alive.append(sum(reference() is not None for reference in earlier))
            earlier.append(weakref.ref(values))
            part = TensorPart(name="rows", values=values, start=start)
            del values
            yield part
            del part

    with ArenaWriter(LAYOUT).writing(VERSION) as (_, slot):
        assert write_parts(slot, parts()) == {"rows": 24}
    assert max(alive) <= 1


def test_hashing_shares_are_even_in_bytes() -> None:
    layout = tuple(
        TensorSpec(name=str(i), shape=(size,), dtype="float32")
        for i, size in enumerate([8, 3, 3, 2])
    )
    sizes = {spec.name: num_bytes(spec) for spec in layout}
    assert [sum(sizes[name] for name in names) for names in shares(layout, 2)] == [
        32,
        32,
    ]
    assert shares(layout, 5)[4] == []


def test_no_rank_writes_a_slot_that_an_engine_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[object] = []
    monkeypatch.setattr(arena_staging, "_send", lambda value, rank: sent.append(value))
    monkeypatch.setattr("invrl.weights.transports.arena._SLOT_FREE_WITHIN_S", 0.05)
    writer = ArenaWriter(LAYOUT)
    place = msgspec.json.decode(
        writer.stage(VERSION, model().items()).handle, type=ArenaHandle
    )
    with (
        SlotLease(place.path, 1 - place.slot, writes=False),
        pytest.raises(WeightSyncError, match="reads"),
    ):
        stage_first(writer, WeightVersion(2), LAYOUT, parts_of(0), [1])
    assert sent == []
