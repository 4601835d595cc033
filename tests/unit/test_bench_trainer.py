"""What `invrl bench train` measures with, and how ratios follow from what its processes wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_model import make_tiny_model

from invrl.bench.trainer import BenchSettings, _ratios_of_steps, _refusal, _StepResult
from invrl.bench.workloads import make_batch
from invrl.cli.main import main
from invrl.train.config import TrainConfig
from invrl.train.micro_batch import rows_of
from invrl.train.packing import pack


def lengths(workload: str) -> list[int]:
    batch = make_batch(workload, num_tokens=4096, longest=1024, vocab_size=500)
    return [len(sample.tokens_T) for sample in batch.samples]


def test_lengths_are_equal_or_long_tailed() -> None:
    assert lengths("equal_lengths") == [256] * 16
    tail = lengths("long_tailed")
    assert 0.8 * 4096 < sum(tail) <= 4096
    assert max(tail) > 4 * np.median(tail)
    assert max(tail) <= 1024


@pytest.mark.parametrize(
    ("workload", "computed"), [("equal_lengths", 16 * 255), ("shared_prompts", 2 * 128 + 16 * 127)]
)
def test_only_the_prompts_of_groups_are_shared(workload: str, computed: int) -> None:
    batch = make_batch(workload, num_tokens=4096, longest=1024, vocab_size=50_000)
    assert batch.total_tokens == sum(int(sample.loss_mask_T.sum()) for sample in batch.samples) > 0
    micro_batches = pack(rows_of(batch.samples), max_tokens=8192, share_prefixes=True)
    assert sum(len(micro_batch.tokens_P) for micro_batch in micro_batches) == computed


def test_the_objective_is_what_is_neither_model_nor_optimizer() -> None:
    """1 s of 10 in the first step, 2 of 10 in the second."""
    steps = _StepResult(
        speeds={"equal_lengths": {"ours": [300.0, 330.0], "reference": [300.0, 300.0]}},
        phases=[
            {"forward_backward": 8.0, "optimizer": 1.0, "objective": 0.5, "total": 10.0},
            {"forward_backward": 7.0, "optimizer": 1.0, "objective": 0.5, "total": 10.0},
        ],
        operations_per_s=[4e9, 6e9],
        matmul_operations_per_s=1e10,
    )
    ratios, _ = _ratios_of_steps(steps)
    assert ratios == pytest.approx(
        {"equal_lengths": 1.05, "compute_share": 0.85, "model_flops_utilization": 0.5}
    )


def test_a_layout_that_does_not_divide_the_model_is_not_measured(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", heads=3, kv_heads=3, head_dim=16)
    settings = BenchSettings(
        model_path=str(model),
        train=TrainConfig.model_validate({}),
        num_tokens=512,
        repetitions=1,
        cores=2,
        deadline_s=60.0,
    )
    assert "num_attention_heads 3" in _refusal(settings, {"tensor_model_parallel_size": 2})
    assert _refusal(settings, {"data_parallel_size": 2}) == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["loop"], "it measures the trainer only"),
        (["train"], "--model-path"),
        (["train", "--model-path", "MODEL", "--tokens", "many"], "bench num_tokens"),
        (["train", "--model-path", "EMPTY"], "config.json"),
        (["train", "--model-path", "MODEL", "--repetition", "2"], "did you mean --repetitions"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"MODEL": str(make_tiny_model(tmp_path / "model")), "EMPTY": str(tmp_path)}
    given = [folders.get(argument, argument) for argument in arguments]
    assert main(["bench", *given]) == 2
    assert reason in capsys.readouterr().err
