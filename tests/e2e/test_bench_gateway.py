"""The gateway's bench measures all of its numbers, in seconds, where their values mean
nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gateway import SMOKE, TARGETS
from e2e.runs import DEADLINE_S, run_benchmark

pytestmark = pytest.mark.slow


@pytest.mark.timeout(DEADLINE_S)
def test_the_bench_of_the_gateway_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    printed = run_benchmark(tmp_path, "gateway", "--smoke", "--out", str(out))
    result = json.loads(out.read_text())
    assert result["ratios"].keys() == TARGETS.keys()
    assert all(f"\n{name} " in printed for name in TARGETS)
    assert result["ratios"]["held"] == 1.0
    assert all(ratio > 0 for ratio in result["ratios"].values())
    streams = result["streams"]
    hold = result["hold"]
    ideal = SMOKE.agents / SMOKE.pace_s
    assert 0 < streams["paced"]["tokens_per_s"] <= 1.01 * ideal
    assert streams["paced"]["reference_tokens_per_s"] <= 1.01 * ideal
    for name in ("latency", "streamed"):
        assert (
            result[name]["direct_ms"]["whole_p50"]
            >= result[name]["tokens_per_answer"] * 1000 * SMOKE.pace_s
        )
        assert {"gateway", "router", "engine", "load"} == result[name][
            "cpu_ms_per_request"
        ]["on"].keys()
        assert result[name]["cpu_ms_per_request"]["on"]["gateway"] > 0
    assert {"whole", "streamed"} == result["saturated"].keys()
    assert (hold["sessions"], hold["errors"]) == (SMOKE.held, 0)
    assert hold["tokens"] == SMOKE.held * 8
    assert len(hold["rss_mb"]) > 1
    assert isinstance(hold["mb_per_minute"], float)
