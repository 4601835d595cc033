"""What the trainer is estimated to need, beside what it was seen to take."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import make_family_model
from rank_pool import RankPool
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.metrics import resolve
from invrl.train.config import TrainConfig
from invrl.train.hf_config import read_hf_config
from invrl.train.memory import saved_bytes
from invrl.train.parallel.layout import ParallelLayout

TOKENS = 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma3_text", "glm4_moe", "llama", "qwen3", "qwen3_moe"])
def test_a_layer_saves_what_is_estimated(pool: RankPool, tmp_path: Path, family: str, dtype: str) -> None:
    """From models of two and of six layers, so that embedding and projection drop out."""
    measured: dict[int, int] = {}
    for layers in (2, 6):
        fields: dict[str, object] = {
            "num_hidden_layers": layers,
            "hidden_size": 128,
            "intermediate_size": 256,
        }
        if family == "gemma3_text":
            fields["layer_types"] = ["full_attention"] * layers
        model = make_family_model(tmp_path / str(layers), family, **fields)
        train = TrainConfig.model_validate({"train_dtype": dtype})
        (measured[layers],) = pool.build(model, train=train).each("saved_bytes", TOKENS)
    config = read_hf_config(tmp_path / "6")
    item = 2 if dtype == "bfloat16" else 4
    expected = sum(saved_bytes(config, layer, item, on_cuda=False) for layer in range(2, 6)) * TOKENS
    assert expected == pytest.approx(measured[6] - measured[2], rel=0.2)


def test_a_step_reports_what_the_largest_rank_took(pool: RankPool, tmp_path: Path) -> None:
    """Here the one of the first pipeline stage; the metrics come from the last. (A rank of the pool is a fork
    of a larger process, so the estimate is only compared in its order of magnitude.)"""
    model = make_tiny_model(tmp_path / "model")
    trainer = pool.build(model, layout=ParallelLayout(pipeline=2))
    before = resolve(trainer.train(random_batch(0)))
    trainer.part([0]).each("hold", 600_000_000)
    after = resolve(trainer.train(random_batch(0)))
    assert 0.3 < before["peak_memory_gb"] < 3
    assert after["peak_memory_gb"] == pytest.approx(before["peak_memory_gb"] + 0.6, abs=0.2)
    assert 0.5 < before["estimated_memory_gb"] < 1
    assert after["largest_micro_batch"] == before["largest_micro_batch"] > 0
