"""What the trainer is estimated to need, beside what it was seen to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.families.hf_config import read_hf_config
from invrl.train.config import TrainConfig
from invrl.train.cost.activation_memory import LayerActivations, Recomputation
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.metrics import resolve

TOKENS = 256


def saved_and_estimated(
    pool: RankPool,
    folder: Path,
    family: str,
    dtype: str,
    *,
    layout: ParallelLayout | None = None,
    megatron: dict[str, Any] | None = None,
) -> tuple[list[int], float]:
    """Bytes that four layers save on each rank, and the estimate of them. From models
    of two and of six layers, so that embedding and projection drop out."""
    layout = layout or ParallelLayout()
    megatron = megatron or {}
    measured: list[NDArray[np.int64]] = []
    for num_layers in (2, 6):
        fields: dict[str, object] = {
            "num_hidden_layers": num_layers,
            "hidden_size": 128,
            "intermediate_size": 256,
        }
        if family == "gemma3_text":
            fields["layer_types"] = ["full_attention"] * num_layers
        model = make_family_model(folder / str(num_layers), family, **fields)
        train = TrainConfig.model_validate({"train_dtype": dtype})
        trainer = pool.build(model, train=train, layout=layout, megatron=megatron)
        measured.append(np.array(trainer.each("saved_bytes", TOKENS)))
    config = read_hf_config(folder / "6")
    item = 2 if dtype == "bfloat16" else 4
    layers = [
        LayerActivations.of(
            config, layer, item, on_cuda=False, context_ranks=layout.context
        )
        for layer in range(2, 6)
    ]
    estimated = (
        Recomputation.of(megatron).kept(layers)
        * TOKENS
        / (layout.tensor * layout.context)
    )
    return list(measured[1] - measured[0]), estimated


@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3_text", "glm4_moe", "llama", "qwen3", "qwen3_moe"]
)
def test_layer_saves_the_estimated_bytes(
    pool: RankPool, tmp_path: Path, family: str, dtype: str
) -> None:
    [saved], estimated = saved_and_estimated(pool, tmp_path, family, dtype)
    assert estimated == pytest.approx(saved, rel=0.2)


@pytest.mark.parametrize(
    ("layout", "megatron"),
    first_quick(
        [
            (ParallelLayout(tensor=2), {}),
            (ParallelLayout(context=2), {}),
            (
                ParallelLayout(),
                {
                    "recompute_granularity": "selective",
                    "recompute_modules": "core_attn",
                },
            ),
        ]
    ),
    ids=["tensor", "context", "recomputed"],
)
def test_latent_attention_saves_the_estimated_bytes(
    pool: RankPool, tmp_path: Path, layout: ParallelLayout, megatron: dict[str, Any]
) -> None:
    """On each of two ranks, and where attention is computed again."""
    saved, estimated = saved_and_estimated(
        pool, tmp_path, "deepseek_v3", "bfloat16", layout=layout, megatron=megatron
    )
    for rank_saved in saved:
        assert estimated == pytest.approx(rank_saved, rel=0.1)


def test_step_reports_the_memory_of_the_largest_rank(
    pool: RankPool, tmp_path: Path
) -> None:
    """Here the one of the first pipeline stage; the metrics come from the last. (A rank
    of the pool is a fork of a larger process, so the estimate is only compared in its
    order of magnitude.)"""
    model = make_tiny_model(tmp_path / "model")
    trainer = pool.build(model, layout=ParallelLayout(pipeline=2))
    before = resolve(trainer.train(random_batch(0)))
    trainer.part([0]).each("hold", 600_000_000)
    after = resolve(trainer.train(random_batch(0)))
    assert 0.3 < before["peak_memory_gb"] < 3
    assert after["peak_memory_gb"] == pytest.approx(
        before["peak_memory_gb"] + 0.6, abs=0.2
    )
    assert 0.5 < before["estimated_memory_gb"] < 1
    assert after["largest_micro_batch"] == before["largest_micro_batch"] > 0
