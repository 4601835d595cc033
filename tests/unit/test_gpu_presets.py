"""The presets for GPUs, against the estimate of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from large_models import make_large_model

from invrl.cli.flags import parse_flags
from invrl.run.processes.gpu_plan import plan_run
from invrl.run.processes.trainer_memory import trainer_memory, with_divided_memory
from invrl.run.settings.config import Config, resolve

CARD_24 = 24_000_000_000
CARD_80 = 80_000_000_000
WARNED_FROM = 0.9
"""Share of a card from which doctor warns that a step may not fit."""


def configured(preset: str, model: Path, *flags: str) -> Config:
    required = ["--config", preset, "--model-path", str(model)]
    return resolve(*parse_flags([*required, *flags]))


def trainer_bytes(config: Config, *, gpus: int, gpu_bytes: int) -> float:
    budget = trainer_memory(config, gpus=gpus, gpu_bytes=gpu_bytes)
    assert budget is not None
    return budget.largest().total


@pytest.mark.parametrize(
    ("preset", "size", "gpus", "gpu_bytes"),
    [
        ("gpu_24gb", "0.6B", 1, CARD_24),
        ("gpu_80gb", "4B", 1, CARD_80),
        ("gpu_8x80gb", "8B", 8, CARD_80),
        ("gpu_8x80gb_moe", "30B-A3B", 8, CARD_80),
    ],
)
def test_preset_fits_its_cards(
    tmp_path: Path, preset: str, size: str, gpus: int, gpu_bytes: int
) -> None:
    config = configured(preset, make_large_model(tmp_path / size, size))
    plan = plan_run(config, gpus)
    assert plan is not None
    assert len(plan.numbers) == gpus
    needed = trainer_bytes(config, gpus=gpus, gpu_bytes=gpu_bytes)
    assert needed < WARNED_FROM * gpu_bytes
    divided = with_divided_memory(config, plan, gpu_bytes=gpu_bytes)
    if not plan.shares:
        assert divided == config
        return
    tokens = divided.engine.max_total_tokens
    assert tokens is not None
    assert tokens >= 4 * (config.train.max_sample_tokens or 0)


def test_presets_hold_their_models_only_as_they_are(tmp_path: Path) -> None:
    """With the optimizer in main memory, or with the model divided."""
    four = make_large_model(tmp_path / "4B", "4B")
    on_gpu = configured("gpu_80gb", four, "--no-optimizer-cpu-offload")
    assert trainer_bytes(on_gpu, gpus=1, gpu_bytes=CARD_80) > CARD_80
    eight = make_large_model(tmp_path / "8B", "8B")
    layout = ("--tensor-model-parallel-size", "1", "--data-parallel-size", "4")
    undivided = configured("gpu_8x80gb", eight, *layout)
    assert trainer_bytes(undivided, gpus=8, gpu_bytes=CARD_80) > CARD_80
