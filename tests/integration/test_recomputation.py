"""Activations that are recomputed in the backward pass: the same gradients bit for bit,
in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import make_family_model
from rank_pool import Arrays, RankPool
from slow_cases import named_quick
from tiny_model import make_tiny_model
from train_reference import random_batch, worst

from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout

Options = dict[str, Any]


def full(method: str, num_layers: int) -> Options:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def selective(*modules: str) -> Options:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


CASES = {
    "gemma3_text": (
        "gemma3_text",
        ParallelLayout(),
        [full("uniform", 2), selective("core_attn", "mlp")],
    ),
    "ep2": (
        "glm4_moe",
        ParallelLayout(data=2, expert=2),
        [full("block", 1), selective("moe"), selective("core_attn", "shared_experts")],
    ),
    "tp2cp2": (
        "gemma3_text",
        ParallelLayout(tensor=2, context=2),
        [full("uniform", 1), selective("core_attn")],
    ),
    "pp2vpp2": (
        "gemma3_text",
        ParallelLayout(pipeline=2, virtual_pipeline=2),
        [full("block", 1), selective("core_attn", "mlp")],
    ),
}


@pytest.mark.parametrize("name", named_quick(CASES.keys(), "gemma3_text"))
def test_recomputation_changes_no_gradient(
    pool: RankPool, tmp_path: Path, name: str
) -> None:
    """The gather of keys and values, windows, norms after attention and MLP, and the
    exchange of tokens between ranks with different experts included."""
    family, layout, recomputations = CASES[name]
    windows: Options = {}
    if family == "gemma3_text":
        windows["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = make_family_model(
        tmp_path / "model",
        family,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        **windows,
    )
    expected = gradients(pool, model, layout, {})
    for options in recomputations:
        gap, tensor = worst(gradients(pool, model, layout, options), expected)
        assert gap == 0.0, f"{options}: {tensor}"


def gradients(
    pool: RankPool, model: Path, layout: ParallelLayout, megatron: Options
) -> Arrays:
    train = TrainConfig(train_dtype="float32", max_tokens_per_micro_batch=41)
    trainer = pool.build(model, layout=layout, train=train, megatron=megatron)
    trainer.train(random_batch(3))
    [step] = trainer.steps()
    return step.gradients


@pytest.mark.slow
def test_recomputation_takes_less_memory(pool: RankPool, tmp_path: Path) -> None:
    """Of 16 layers, full recomputation keeps the input of each, and one layer whole."""
    model = make_tiny_model(tmp_path / "model", layers=16, hidden=64)
    batch = random_batch(0, groups=8, rollouts=4, prompt=200, answer=200)
    [shard] = shard_batch(batch, ranks=1, steps=1)

    def growth(options: Options) -> int:
        train = TrainConfig(
            train_dtype="float32", share_prefixes=False, max_tokens_per_micro_batch=8192
        )
        [grown] = pool.build(model, train=train, megatron=options).each(
            "growth", ("train", shard)
        )
        return grown

    least = growth(full("uniform", 1))
    most = growth({})
    print(f"{least / 2**20:.0f} MiB with recomputation, {most / 2**20:.0f} MiB without")
    assert least < most / 3
