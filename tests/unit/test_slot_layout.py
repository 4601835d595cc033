"""Where tensors lie in a slot: the engine's order without gaps, room for padding,
nothing twice."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from invrl.errors import LayoutError
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.slot_layout import slot_layout

LAYER = "model.layers.0"


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


DENSE = (
    spec("model.embed_tokens.weight", 70, 4),
    spec(f"{LAYER}.self_attn.v_proj.weight", 3, 4),
    spec(f"{LAYER}.self_attn.q_proj.weight", 9, 4),
    spec(f"{LAYER}.input_layernorm.weight", 4),
    spec(f"{LAYER}.self_attn.k_proj.weight", 3, 4),
    spec(f"{LAYER}.self_attn.k_proj.bias", 3),
    spec(f"{LAYER}.self_attn.q_proj.bias", 9),
)
EXPERTS = tuple(
    spec(f"{LAYER}.mlp.experts.{expert}.{name}.weight", *shape)
    for expert in (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    for name, shape in (
        ("down_proj", (4, 3)),
        ("up_proj", (3, 4)),
        ("gate_proj", (3, 4)),
    )
)
MIXED = (
    spec("model.a.gate_proj.weight", 5, 4),
    spec("model.a.up_proj.weight", 5, 4, dtype="float32"),
)


@pytest.mark.parametrize("layout", [DENSE, EXPERTS, MIXED, DENSE + EXPERTS + MIXED])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_in_a_slot_do_not_overlap_and_are_aligned(
    layout: tuple[TensorSpec, ...], seed: int
) -> None:
    shuffled = tuple(random.Random(seed).sample(layout, len(layout)))
    shuffled_layout = slot_layout(shuffled)
    ends = {
        tensor.name: shuffled_layout.offsets[tensor.name] + num_bytes(tensor)
        for tensor in shuffled
    }
    in_order = sorted(
        shuffled_layout.offsets, key=lambda name: shuffled_layout.offsets[name]
    )
    for name, next_name in pairwise(in_order):
        assert ends[name] <= shuffled_layout.offsets[next_name]
    assert ends[in_order[-1]] <= shuffled_layout.num_bytes
    for tensor in shuffled:
        assert (
            shuffled_layout.offsets[tensor.name]
            % {"bfloat16": 2, "float32": 4}[tensor.dtype]
            == 0
        )
    assert list(shuffled_layout.offsets) == [tensor.name for tensor in shuffled]


def test_weights_fused_by_an_engine_are_contiguous_in_its_order() -> None:
    at = slot_layout(DENSE).offsets
    q, k, v = (at[f"{LAYER}.self_attn.{name}_proj.weight"] for name in "qkv")
    assert q % 64 == 0
    assert k - q == 9 * 8
    assert v - k == 3 * 8
    assert (
        at[f"{LAYER}.self_attn.k_proj.bias"] - at[f"{LAYER}.self_attn.q_proj.bias"]
        == 9 * 2
    )
    at = slot_layout(EXPERTS).offsets
    for expert in range(11):
        experts = f"{LAYER}.mlp.experts"
        gate, up = (
            at[f"{experts}.{expert}.{name}_proj.weight"] for name in ("gate", "up")
        )
        assert gate - at[f"{experts}.0.gate_proj.weight"] == expert * 2 * 24
        assert up - gate == 24
        down = at[f"{experts}.{expert}.down_proj.weight"]
        assert down - at[f"{experts}.0.down_proj.weight"] == expert * 24


def test_embedding_has_room_for_the_padding_of_the_engine() -> None:
    at = slot_layout(DENSE).offsets
    assert min(start for start in at.values() if start) >= 128 * 8
    assert slot_layout(DENSE[:1]).num_bytes == 128 * 8


def test_tensors_of_different_dtypes_do_not_share_a_parameter() -> None:
    at = slot_layout(MIXED).offsets
    assert at["model.a.up_proj.weight"] == 64


def test_slot_layout_refuses_a_duplicate_name() -> None:
    with pytest.raises(LayoutError, match="twice"):
        slot_layout((*DENSE, DENSE[0]))
