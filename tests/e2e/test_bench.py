"""The bench measures all of its ratios, on a tiny model, where their values mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.ratios import TARGETS

from e2e.runs import DEADLINE_S, run_bench


@pytest.mark.timeout(DEADLINE_S)
def test_the_bench_measures_every_ratio_and_every_process(tmp_path: Path) -> None:
    """It checks by itself that our training step and Hugging Face's have the same gradient."""
    out = tmp_path / "bench.json"
    run_bench(tmp_path, "loop", "--smoke", "--repetitions", "1", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["ratios"].keys() == TARGETS.keys()
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert 0.0 < result["ratios"]["busy_share"] <= 1.0
    roles = result["run"]["processes"]["roles"]
    ours = {"driver", "trainer", "buffer", "worker", "gateway", "router", "engine", "ray"}
    assert ours <= roles.keys()
    assert all(
        roles[role]["peak_pss_mb"] > 0 for role in ours
    )  # others may be seen when they have just begun
