"""What `python -m benchmarks.train` measures with, and how ratios follow from what its
processes wrote."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from tiny_model import make_tiny_model

from benchmarks.ratios import Part
from benchmarks.train import benchmark_training
from benchmarks.training import trainer
from benchmarks.training.even_model import even_heads, make_even_model
from benchmarks.training.hugging_face_step import pad_batch
from benchmarks.training.trainer import (
    BenchSettings,
    _LayoutResult,
    _refusal,
    _step_ratios,
    _StepResult,
    measure_trainer,
)
from benchmarks.training.workloads import make_batch
from invrl.cli.main import run_with_exit_code
from invrl.errors import TrainError
from invrl.families.hf_config import read_hf_config
from invrl.host.processes.process import still_running
from invrl.train.batches.micro_batch import token_sequences
from invrl.train.batches.packing import pack
from invrl.train.config import TrainConfig
from invrl.user_code.model_folder import tensor_shapes


def lengths(workload: str) -> list[int]:
    batch = make_batch(workload, num_tokens=4096, longest=1024, vocab_size=500)
    return [len(sample.tokens_T) for sample in batch.samples]


def test_bench_lengths_are_equal_or_long_tailed() -> None:
    assert lengths("equal_lengths") == [256] * 16
    tail = lengths("long_tailed")
    assert 0.8 * 4096 < sum(tail) <= 4096
    assert max(tail) > 4 * np.median(tail)
    assert max(tail) <= 1024


@pytest.mark.parametrize(
    ("workload", "computed"),
    [
        ("equal_lengths", 16 * 255),
        ("shared_prompts", 2 * 128 + 16 * 127),
    ],
)
def test_only_the_prompts_of_groups_are_shared(workload: str, computed: int) -> None:
    batch = make_batch(workload, num_tokens=4096, longest=1024, vocab_size=50_000)
    assert (
        batch.trained.tokens
        == sum(int(sample.loss_mask_T.sum()) for sample in batch.samples)
        > 0
    )
    micro_batches = pack(
        token_sequences(batch.samples), max_tokens=8192, share_prefixes=True
    )
    assert sum(len(micro_batch.tokens_P) for micro_batch in micro_batches) == computed


@pytest.mark.parametrize("sorted_by_length", [False, True])
def test_a_plain_step_pads_every_sample_once(sorted_by_length: bool) -> None:
    batch = make_batch("long_tailed", num_tokens=4096, longest=1024, vocab_size=500)
    padded = pad_batch(batch, tokens=1024, sorted_by_length=sorted_by_length)
    row_lengths: list[int] = []
    for rows in padded.micro_batches:
        lengths_in_rows = rows.mask_BT.sum(1).tolist()
        row_lengths += lengths_in_rows
        assert rows.mask_BT.shape[1] == max(lengths_in_rows)
        assert rows.mask_BT.numel() <= 1024 or len(lengths_in_rows) == 1
        assert len(rows.rollout_N) == int(rows.trained_BT.sum())
    expected = [len(sample.tokens_T) for sample in batch.samples]
    assert row_lengths == (sorted(expected) if sorted_by_length else expected)
    assert padded.denominators.tokens == sum(
        int(rows.trained_BT.sum()) for rows in padded.micro_batches
    )


def test_objective_time_excludes_model_and_optimizer() -> None:
    """1 s of 10 in the first step, 2 of 10 in the second."""
    steps = _StepResult(
        speeds={"equal_lengths": {"ours": [300.0, 330.0], "reference": [300.0, 300.0]}},
        phases=[
            {
                "forward_backward": 8.0,
                "optimizer": 1.0,
                "objective": 0.5,
                "total": 10.0,
            },
            {
                "forward_backward": 7.0,
                "optimizer": 1.0,
                "objective": 0.5,
                "total": 10.0,
            },
        ],
        operations_per_s=[4e9, 6e9],
        matmul_operations_per_s=1e10,
    )
    assert _step_ratios(steps).ratios == pytest.approx(
        {"equal_lengths": 1.05, "compute_share": 0.85, "model_flops_utilization": 0.5}
    )


def test_a_layout_that_does_not_divide_the_model_is_not_measured(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=3, kv_heads=3, head_dim=16)
    settings = bench_settings(model)
    assert "num_attention_heads 3" in _refusal(
        settings, {"tensor_model_parallel_size": 2}
    )
    assert _refusal(settings, {"data_parallel_size": 2}) == ""


@pytest.mark.parametrize(
    ("own", "even"),
    [
        ((9, 3), (8, 2)),
        ((3, 3), (2, 2)),
        ((1, 1), (2, 2)),
        ((12, 4), (12, 4)),
        ((14, 6), (14, 2)),
    ],
)
def test_two_ranks_divide_the_heads(
    own: tuple[int, int], even: tuple[int, int]
) -> None:
    assert even_heads(*own) == even


def test_bench_uses_another_model_where_two_ranks_cannot_divide_the_heads(
    tmp_path: Path,
) -> None:
    source = make_tiny_model(tmp_path / "model", heads=3, kv_heads=3, head_dim=16)
    make_even_model(source, tmp_path / "even")
    config = read_hf_config(tmp_path / "even")
    before = read_hf_config(source)
    assert config.differences(before) == ["num_attention_heads", "num_key_value_heads"]
    TrainConfig(tensor_model_parallel_size=2).check_model(config)
    shapes = tensor_shapes(tmp_path / "even")
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [
        2 * 16,
        config.hidden_size,
    ]


def bench_settings(model: Path) -> BenchSettings:
    return BenchSettings(
        model_path=str(model),
        train=TrainConfig.model_validate({}),
        num_tokens=512,
        repetitions=1,
        cores=2,
        deadline_s=60.0,
    )


def measured(
    monkeypatch: pytest.MonkeyPatch, model: Path, *, failing: str
) -> tuple[list[Part], list[tuple[str, bool]]]:
    """The parts, and what was measured: (layout, whether of the model itself).
    `failing`: a layout."""
    layouts: list[tuple[str, bool]] = []

    def layout_result(
        settings: BenchSettings, _: Path, name: str, *__: object, threads: int
    ) -> _LayoutResult:
        layouts.append((name, settings.model_path == str(model)))
        if name == failing:
            raise TrainError("out of memory")
        return _LayoutResult(
            seconds=[2.0],
            peak_memory_gb=2.0,
            largest_micro_batch=512,
            row_tokens=100 * threads,
        )

    def steps_fail(*_: object) -> None:
        raise TrainError("these are not the same step")

    monkeypatch.setattr(trainer, "_measure_steps", steps_fail)
    monkeypatch.setattr(trainer, "_measure_layout", layout_result)
    return list(measure_trainer(bench_settings(model))), layouts


def test_failure_of_one_trainer_measurement_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=4, kv_heads=2, head_dim=16)
    parts, _ = measured(monkeypatch, model, failing="data_parallel_2")
    steps, memory, data, tensor = parts
    assert "not the same step" in steps.failure
    assert memory.ratios["minimum_memory"] > 0
    assert data.failure == "data_parallel_2: out of memory"
    assert tensor.ratios == {"tensor_parallel_2": 0.5}


@pytest.mark.slow
def test_comparison_with_one_process_needs_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=3, kv_heads=3, head_dim=16)
    parts, layouts = measured(monkeypatch, model, failing="one_process")
    assert [bool(part.failure) for part in parts] == [True, True, True, False]
    assert "nothing to compare with" in parts[2].failure
    assert layouts == [
        ("one_process", True),
        ("one_even", False),
        ("tensor_parallel_2", False),
    ]
    assert parts[3].details["tensor_parallel_2"]["heads"] == [2, 2]


@pytest.mark.slow
def test_measured_process_ends_with_a_killed_bench(tmp_path: Path) -> None:
    """`http.server` stands for a rank."""
    script = (
        "import sys; from pathlib import Path; from benchmarks.training.trainer import _Program;"
        "program = _Program('http.server', Path(sys.argv[1])); program.start({}, '0');"
        "print(program._process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as bench:
        assert bench.stdout is not None
        measured = psutil.Process(int(bench.stdout.readline()))
        bench.kill()
        remaining = still_running([measured], within_s=30.0)
    for process in remaining:
        process.kill()
    assert remaining == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--model-path"),
        (["--model-path", "MODEL", "--tokens", "many"], "train num_tokens"),
        (["--model-path", "EMPTY"], "config.json"),
        (
            ["--model-path", "MODEL", "--repetition", "2"],
            "did you mean --repetitions",
        ),
    ],
)
def test_trainer_bench_refuses_bad_arguments(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {
        "MODEL": str(make_tiny_model(tmp_path / "model")),
        "EMPTY": str(tmp_path),
    }
    command_line = [folders.get(argument, argument) for argument in arguments]
    assert run_with_exit_code(partial(benchmark_training, command_line)) == 2
    assert reason in capsys.readouterr().err
