"""The factors of an adapter as SGLang stacks them, taken apart again."""

from __future__ import annotations

import torch

from invrl.engines.inside_sglang.adapter_loads import unstacked


def test_stacked_factors_are_taken_apart_under_their_own_names() -> None:
    arrived = {
        f"layers.0.{module}.lora_B.weight": torch.rand(rows, 2)
        for module, rows in {
            "self_attn.q_proj": 8,
            "self_attn.k_proj": 4,
            "self_attn.v_proj": 4,
            "self_attn.o_proj": 6,
            "mlp.gate_proj": 5,
            "mlp.up_proj": 5,
        }.items()
    }
    q, k, v, o, gate, up = arrived.values()
    held = {
        "layers.0.self_attn.qkv_proj.lora_B.weight": torch.cat([q, k, v]),
        "layers.0.mlp.gate_up_proj.lora_B.weight": torch.cat([gate, up]),
        "layers.0.self_attn.o_proj.lora_B.weight": o,
    }
    rows = {name: len(factor) for name, factor in arrived.items()}
    found = dict(unstacked(held, rows))
    assert found.keys() == arrived.keys()
    for name, factor in arrived.items():
        assert torch.equal(found[name], factor)


def test_a_stack_with_a_factor_that_did_not_arrive_is_left_out() -> None:
    """SGLang fills it with zeros. An error here would end its scheduler."""
    layer = "layers.0.mlp"
    held = {
        f"{layer}.gate_up_proj.lora_B.weight": torch.zeros(10, 2),
        f"{layer}.down_proj.lora_B.weight": torch.ones(4, 2),
    }
    rows = {
        f"{layer}.gate_proj.lora_B.weight": 5,
        f"{layer}.down_proj.lora_B.weight": 4,
    }
    assert set(dict(unstacked(held, rows))) == {f"{layer}.down_proj.lora_B.weight"}
