"""The bench measures all of its ratios, on a tiny model, where their values mean
nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from benchmarks.ratios import TARGETS, read_history
from benchmarks.training import trainer
from e2e.runs import DEADLINE_S, run_benchmark

pytestmark = pytest.mark.slow


@pytest.mark.timeout(DEADLINE_S)
def test_the_bench_measures_every_ratio_and_every_process(tmp_path: Path) -> None:
    """It checks by itself that our training step and Hugging Face's have the same
    gradient."""
    out = tmp_path / "bench.json"
    run_benchmark(tmp_path, "loop", "--smoke", "--repetitions", "1", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["ratios"].keys() == TARGETS.keys()
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert 0.0 < result["ratios"]["busy_share"] <= 1.0
    roles = result["run"]["processes"]["roles"]
    ours = {
        "driver",
        "trainer",
        "buffer",
        "worker",
        "gateway",
        "router",
        "engine",
        "ray",
    }
    assert ours <= roles.keys()
    # others may be seen when they have just begun
    assert all(roles[role]["peak_pss_mb"] > 0 for role in ours)


@pytest.mark.timeout(DEADLINE_S)
def test_the_trainer_is_measured_by_a_command(tmp_path: Path) -> None:
    """It fails if the gradient of our step has not the norm of Hugging Face's."""
    model = make_tiny_model(tmp_path / "model")
    flags = "--tokens 512 --max-tokens-per-micro-batch 256 --repetitions 1 --cores 2 --results results".split()
    run_benchmark(tmp_path, "train", "--model-path", str(model), *flags)
    result = json.loads((tmp_path / "results" / "train.json").read_text())
    [entry] = read_history(tmp_path / "results" / "history.jsonl")
    assert entry.ratios == result["ratios"]
    layouts = {"data_parallel_2", "tensor_parallel_2"}
    others = {
        "long_tailed_sorted",
        "shared_prompts",
        "model_flops_utilization",
        "minimum_memory",
    }
    assert result["ratios"].keys() == trainer.TARGETS.keys() | layouts | others
    assert all(ratio > 0 for ratio in result["ratios"].values())
    for share in ("compute_share", "model_flops_utilization", "minimum_memory"):
        assert result["ratios"][share] < 1


@pytest.mark.timeout(DEADLINE_S)
def test_weight_updates_of_the_loader_alone_are_measured_by_a_command(
    tmp_path: Path,
) -> None:
    """Requests in flight at a stand-in for an engine: `unit/test_bench_weights.py`."""
    model = make_tiny_model(tmp_path / "model")
    flags = "--no-engine --no-1b --repetitions 2 --results results".split()
    run_benchmark(tmp_path, "weights", "--model-path", str(model), *flags)
    result = json.loads((tmp_path / "results" / "weights.json").read_text())
    [entry] = read_history(tmp_path / "results" / "history.jsonl")
    assert entry.ratios == result["ratios"]
    assert result["ratios"].keys() == {"loader", "broadcast"}
    for name, ratio in result["ratios"].items():
        assert ratio > 0
        assert {"stage", "prepare", "pause", "load", "commit", "resume"} <= result[
            name
        ]["phases"].keys()
        assert result[name]["unequal_tensors"] == 0
