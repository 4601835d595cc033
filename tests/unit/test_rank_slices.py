"""Engines of several ranks: the slice that each takes from the arena, and what is wrong
with it. Without SGLang; with it: `tests/integration/test_engine_ranks.py`."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest
import torch
from loader_engines import (
    ATTENTION,
    EXPERT,
    RANKS,
    SLICED_LAYOUT,
    SlicedEngine,
    rank_parameters,
    sliced_values,
)

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.client.weight_receiver import ArenaReceiver, FolderReceiver
from invrl.errors import ChecksumError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.config import ArenaWeights
from invrl.weights.loader import weight_loader
from invrl.weights.tensors.engine_parameters import engine_parameter
from invrl.weights.tensors.tensor_slice import EngineRank, rank_slices
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter
from invrl.weights.update.committed import load_verified


@pytest.fixture
def engine() -> SlicedEngine:
    return SlicedEngine()


@pytest.fixture
def writer() -> ArenaWriter:
    return ArenaWriter(SLICED_LAYOUT, checksums_add_up=True)


def receiver_of(engine: SlicedEngine, **settings) -> ArenaReceiver:
    client = cast("SglangClient", engine)
    return ArenaReceiver("engine-0", client, ArenaWeights(**settings), num_ranks=RANKS)


def stage(writer: ArenaWriter, version: int) -> StagedWeights:
    return writer.stage(WeightVersion(version), sliced_values(version).items())


async def test_each_engine_rank_loads_its_slices(
    engine: SlicedEngine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    for version in (1, 2, 3):  # read back, not read back, into the slot of the first
        staged = stage(writer, version)
        await receiver.check(SLICED_LAYOUT, staged)
        await load_verified(receiver, staged)
    read_back = await receiver.read_back(SLICED_LAYOUT)
    assert dict(read_back.checksums) == dict(staged.checksums)
    new = sliced_values(3)
    for rank, parameters in enumerate(engine.ranks):
        embedding = new["model.embed_tokens.weight"][16 * rank : 16 * rank + 16]
        assert torch.equal(
            parameters["model.embed_tokens.weight"][: len(embedding)], embedding
        )
        for part in ("weight", "bias"):
            q, k, v = (new[f"{ATTENTION}.{n}_proj.{part}"] for n in "qkv")
            head = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
            fused = torch.cat([q[4 * rank : 4 * rank + 4], k[head], v[head]])
            assert torch.equal(parameters[f"{ATTENTION}.qkv_proj.{part}"], fused)
        columns = slice(4 * rank, 4 * rank + 4)
        o = new[f"{ATTENTION}.o_proj.weight"]
        assert torch.equal(parameters[f"{ATTENTION}.o_proj.weight"], o[:, columns])
        gate, up, down = (
            new[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        gate_up = parameters["model.layers.0.mlp.gate_up_proj.weight"]
        assert torch.equal(gate_up, torch.cat([gate[columns], up[columns]]))
        assert torch.equal(
            parameters["model.layers.0.mlp.down_proj.weight"], down[:, columns]
        )
        for expert in range(2):
            gate, up, down = (
                new[f"{EXPERT}.{expert}.{n}_proj.weight"]
                for n in ("gate", "up", "down")
            )
            rows = slice(2 * rank, 2 * rank + 2)
            w13 = parameters[f"{EXPERT}.w13_weight"][expert]
            assert torch.equal(w13, torch.cat([gate[rows], up[rows]]))
            assert torch.equal(parameters[f"{EXPERT}.w2_weight"][expert], down[:, rows])
        for name in ("model.norm.weight", "model.layers.1.mlp.gate.weight"):
            assert torch.equal(parameters[name], new[name])


@pytest.mark.parametrize("name", list(rank_parameters()))
async def test_readback_finds_one_wrong_bit_in_any_rank(
    engine: SlicedEngine, writer: ArenaWriter, name: str
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(SLICED_LAYOUT, staged)
    await load_verified(receiver, staged)
    for rank in range(RANKS):
        raw_bytes = engine.ranks[rank][name].view(-1).view(torch.uint8)
        raw_bytes[0] ^= 1
        held = (await receiver.read_back(SLICED_LAYOUT)).checksums
        wrong = [
            tensor
            for tensor, value in staged.checksums.items()
            if held[tensor] != value
        ]
        assert len(wrong) == 1
        assert engine_parameter(wrong[0])[0] == name
        raw_bytes[0] ^= 1


async def test_checksum_finds_a_wrong_slice_in_rank_1(
    engine: SlicedEngine, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of rank 1 is given the division of rank 0, as a wrong rule would."""
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(SLICED_LAYOUT, staged)

    def wrong_in_rank_1(parameter, shape, specs, rank):
        if rank.index == 1:
            rank = EngineRank(index=0, size=rank.size)
        return rank_slices(parameter, shape, specs, rank)

    monkeypatch.setattr(weight_loader, "rank_slices", wrong_in_rank_1)
    with pytest.raises(ChecksumError, match="13 of 19 tensors are not what was sent"):
        await load_verified(receiver, staged)


async def test_checksum_finds_a_wrong_bit_that_only_one_rank_reads(
    engine: SlicedEngine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(SLICED_LAYOUT, staged)
    slot = msgspec.json.decode(staged.handle, type=ArenaHandle).slot
    writer._slots[slot][f"{ATTENTION}.o_proj.weight"][3, 9] += 1.0  # a column of rank 2
    with pytest.raises(ChecksumError, match=r"1 of 19 tensors .*o_proj"):
        await load_verified(receiver, staged)


async def test_a_request_that_reaches_another_rank_is_refused(
    engine: SlicedEngine, writer: ArenaWriter
) -> None:
    engine.order = [0, 2, 1, 3]
    with pytest.raises(
        LayoutError, match="for rank 1 of the engine has reached rank 2"
    ):
        await receiver_of(engine).check(SLICED_LAYOUT, stage(writer, 1))


async def test_engine_rank_without_a_reply_is_named(
    engine: SlicedEngine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(SLICED_LAYOUT, staged)
    engine.silent = 2
    with pytest.raises(WeightSyncError, match=r"left no reply: .*engine-0-2"):
        await receiver.load(staged)


async def test_aliases_and_folders_are_refused_before_a_byte_moves(
    engine: SlicedEngine, writer: ArenaWriter
) -> None:
    staged = stage(writer, 1)
    with pytest.raises(LayoutError, match="in the mode copy"):
        await receiver_of(engine, arena_mode="alias").check(SLICED_LAYOUT, staged)
    follower = FolderReceiver(
        "engine-0", cast("SglangClient", engine), ArenaWeights(), num_ranks=RANKS
    )
    with pytest.raises(LayoutError, match="from the arena"):
        await follower.load(
            StagedWeights(
                version=WeightVersion(1), handle="/x", checksums={}, num_bytes=0
            )
        )


@pytest.mark.parametrize(
    ("parameter", "shape", "shapes"),
    [
        (f"{ATTENTION}.qkv_proj.weight", (11, 8), [(16, 8), (8, 8), (8, 8)]),
        (f"{ATTENTION}.qkv_proj.weight", (10, 8), [(16, 8), (8, 8), (8, 8)]),
        (
            f"{ATTENTION}.qkv_proj.weight",
            (32, 8),
            [(16, 8), (8, 8), (8, 8)],
        ),  # heads of zeros beside it
        (f"{ATTENTION}.o_proj.weight", (8, 5), [(8, 18)]),
        ("model.layers.0.mlp.gate_up_proj.weight", (9, 8), [(18, 8), (18, 8)]),
        ("model.layers.0.mlp.gate_up_proj.weight", (7, 8), [(16, 8), (16, 8)]),
    ],
)
def test_unknown_division_of_a_parameter_is_refused(
    parameter: str, shape, shapes
) -> None:
    specs = [
        TensorSpec(name=str(i), shape=whole, dtype="float32")
        for i, whole in enumerate(shapes)
    ]
    with pytest.raises(LayoutError, match="no known division"):
        rank_slices(parameter, shape, specs, EngineRank(index=1, size=4))
