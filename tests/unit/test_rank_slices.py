"""Engines of several ranks: the slice that each takes from the arena, and what is wrong
with it. Without SGLang; with it: `tests/integration/test_engine_ranks.py`."""

from __future__ import annotations

import base64
import pickle
import types
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest
import torch

from invrl.engines.sglang_client import SglangClient
from invrl.engines.weight_receiver import ArenaReceiver, FolderReceiver
from invrl.errors import ChecksumError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types import TensorSpec, WeightVersion
from invrl.weights import in_engine
from invrl.weights.arena import ArenaHandle, ArenaWriter
from invrl.weights.config import WeightSyncConfig
from invrl.weights.engine_parameters import parameter_of
from invrl.weights.tensor_slice import EngineRank, slices_of_rank
from invrl.weights.transaction import load_verified

RANKS = 4
EXPERT = "model.layers.1.mlp.experts"
SHAPES = {
    "model.embed_tokens.weight": (
        50,
        8,
    ),  # padded to 64: the last rank has 2 rows of its 16
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.k_proj.weight": (
        8,
        8,
    ),  # two heads of 4 rows: two ranks share each
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.self_attn.k_proj.bias": (8,),
    "model.layers.0.self_attn.v_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (16, 8),
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.layers.1.mlp.gate.weight": (2, 8),
    **{
        f"{EXPERT}.{e}.{n}_proj.weight": (8, 8)
        for e in range(2)
        for n in ("gate", "up", "down")
    },
    "model.norm.weight": (8,),
}
LAYOUT = tuple(
    TensorSpec(name=name, shape=shape, dtype="float32")
    for name, shape in SHAPES.items()
)
ATTENTION = "model.layers.0.self_attn"


def rank_parameters() -> dict[str, torch.Tensor]:
    """Of one rank of four, as SGLang makes them."""
    return {
        "model.embed_tokens.weight": torch.zeros(16, 8),
        f"{ATTENTION}.qkv_proj.weight": torch.zeros(4 + 4 + 4, 8),
        f"{ATTENTION}.qkv_proj.bias": torch.zeros(4 + 4 + 4),
        f"{ATTENTION}.o_proj.weight": torch.zeros(8, 4),
        "model.layers.0.mlp.gate_up_proj.weight": torch.zeros(4 + 4, 8),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(8, 4),
        "model.layers.1.mlp.gate.weight": torch.zeros(2, 8),
        f"{EXPERT}.w13_weight": torch.zeros(2, 2 + 2, 8),
        f"{EXPERT}.w2_weight": torch.zeros(2, 8, 2),
        "model.norm.weight": torch.zeros(8),
    }


class Engine:
    """SGLang's weight requests, answered by our loader over the parameters of each
    rank."""

    def __init__(self) -> None:
        self.ranks = [rank_parameters() for _ in range(RANKS)]
        self.order = list(range(RANKS))
        """The rank that gets the n-th payload."""
        self.silent = -1
        """The rank whose loader does nothing."""
        self.is_paused = False

    async def begin_weight_update(self) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def pause(self, mode: str = "retract") -> None: ...

    async def resume(self) -> None: ...

    async def weight_version(self) -> str:
        return "1"

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], *, load_format: str, deadline_s: float
    ) -> None:
        for index, payload in zip(self.order, payloads, strict=True):
            if index == self.silent:
                continue
            parameters = self.ranks[index]
            layer = types.SimpleNamespace(tp_size=RANKS, tp_rank=index)
            model = types.SimpleNamespace(
                named_parameters=parameters.items,
                modules=lambda layer=layer: [object(), layer],
            )
            in_engine.run(model, pickle.loads(base64.b64decode(payload)))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def writer() -> ArenaWriter:
    return ArenaWriter(LAYOUT, checksums_add_up=True)


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
    }


def receiver_of(engine: Engine, **settings) -> ArenaReceiver:
    client = cast("SglangClient", engine)
    return ArenaReceiver(
        "engine-0", client, WeightSyncConfig(**settings), num_ranks=RANKS
    )


def stage(writer: ArenaWriter, version: int) -> StagedWeights:
    return writer.stage(WeightVersion(version), values(version).items())


async def test_each_engine_rank_loads_its_slices(
    engine: Engine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    for version in (1, 2, 3):  # read back, not read back, into the slot of the first
        staged = stage(writer, version)
        await receiver.check(LAYOUT, staged)
        await load_verified(receiver, staged)
    read_back = await receiver.read_back(LAYOUT)
    assert dict(read_back.checksums) == dict(staged.checksums)
    new = values(3)
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
    engine: Engine, writer: ArenaWriter, name: str
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(LAYOUT, staged)
    await load_verified(receiver, staged)
    for rank in range(RANKS):
        raw_bytes = engine.ranks[rank][name].view(-1).view(torch.uint8)
        raw_bytes[0] ^= 1
        held = (await receiver.read_back(LAYOUT)).checksums
        wrong = [
            tensor
            for tensor, value in staged.checksums.items()
            if held[tensor] != value
        ]
        assert len(wrong) == 1
        assert parameter_of(wrong[0])[0] == name
        raw_bytes[0] ^= 1


async def test_checksum_finds_a_wrong_slice_in_rank_1(
    engine: Engine, writer: ArenaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of rank 1 is given the division of rank 0, as a wrong rule would."""
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(LAYOUT, staged)

    def wrong_in_rank_1(parameter, shape, specs, rank):
        if rank.index == 1:
            rank = EngineRank(index=0, size=rank.size)
        return slices_of_rank(parameter, shape, specs, rank)

    monkeypatch.setattr(in_engine, "slices_of_rank", wrong_in_rank_1)
    with pytest.raises(ChecksumError, match="13 of 19 tensors are not what was sent"):
        await load_verified(receiver, staged)


async def test_checksum_finds_a_wrong_bit_that_only_one_rank_reads(
    engine: Engine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(LAYOUT, staged)
    slot = msgspec.json.decode(staged.handle, type=ArenaHandle).slot
    writer._slots[slot][f"{ATTENTION}.o_proj.weight"][3, 9] += 1.0  # a column of rank 2
    with pytest.raises(ChecksumError, match=r"1 of 19 tensors .*o_proj"):
        await load_verified(receiver, staged)


async def test_a_request_that_reaches_another_rank_is_refused(
    engine: Engine, writer: ArenaWriter
) -> None:
    engine.order = [0, 2, 1, 3]
    with pytest.raises(
        LayoutError, match="for rank 1 of the engine has reached rank 2"
    ):
        await receiver_of(engine).check(LAYOUT, stage(writer, 1))


async def test_engine_rank_without_a_reply_is_named(
    engine: Engine, writer: ArenaWriter
) -> None:
    receiver = receiver_of(engine)
    staged = stage(writer, 1)
    await receiver.check(LAYOUT, staged)
    engine.silent = 2
    with pytest.raises(WeightSyncError, match=r"left no reply: .*engine-0-2"):
        await receiver.load(staged)


async def test_aliases_and_folders_are_refused_before_a_byte_moves(
    engine: Engine, writer: ArenaWriter
) -> None:
    staged = stage(writer, 1)
    with pytest.raises(LayoutError, match="in the mode copy"):
        await receiver_of(engine, weight_arena="alias").check(LAYOUT, staged)
    follower = FolderReceiver(
        "engine-0", cast("SglangClient", engine), WeightSyncConfig(), num_ranks=RANKS
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
        slices_of_rank(parameter, shape, specs, EngineRank(index=1, size=4))
