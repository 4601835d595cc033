"""A real run, scraped while it trains: what the dashboard and the alerts ask for is
there, and true."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from metric_queries import ADDED_LABELS, LAUNCH, OF_PROMETHEUS, needed, parsed, queries
from prometheus_client.parser import text_string_to_metric_families

from e2e.runs import DEADLINE_S, STEPS
from e2e.scrapes import Scrapes, scrape_paths
from invrl.observe.metrics.metric_families import FAMILIES
from invrl.observe.metrics.metrics_server import PATH
from invrl.store.metrics_file import read_metrics

pytestmark = pytest.mark.timeout(DEADLINE_S)
ABSENT = {
    "invrl_held_out_accuracy_ratio": "no held-out tasks",
    "invrl_held_out_reward_mean": "no held-out tasks",
    "invrl_held_out_loss": "not on a file",
    "invrl_kl_reference": "no reference",
}
"""What a query asks for and this run does not have, and why."""
PROCESSES = {
    "driver",
    "gateway",
    "router",
    "engine-0",
    "rank-0",
    "buffer",
    "rollout-workers",
}
SOURCES = {"buffer", "checkpoints", "disk", "engines", "gateway", "processes"}


def values_of(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """By a sample's name, and by the values of its labels."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sample.labels.values())] = (
                sample.value
            )
    return values


def test_every_metric_and_label_of_a_query_was_served(
    learned: Path, scrapes: Scrapes
) -> None:
    served = scrapes.served()
    missing: set[str] = set()
    asked: dict[str, set[str]] = {}
    for _, query, _ in queries():
        for name, labels in needed(parsed(query)).items():
            asked.setdefault(name, set()).update(labels - ADDED_LABELS)
    for name, labels in asked.items():
        if name not in served:
            missing.add(name)
            continue
        assert labels <= served[name], name
    assert missing - OF_PROMETHEUS == set(ABSENT)


def test_every_job_of_the_scrape_configuration_was_answered(
    learned: Path, scrapes: Scrapes
) -> None:
    assert set(scrapes.texts) == set(scrape_paths())
    assert set(scrapes.statuses[PATH]) == {200}, (
        "from the first answer to the end of the run"
    )
    router = scrapes.texts[f"{PATH}/router"][-1]
    engine = scrapes.texts[f"{PATH}/engine-0"][-1]
    assert "smg_worker_health" in values_of(router)
    assert "sglang:num_running_reqs" in values_of(engine)


def test_every_process_of_the_run_answered_scrapes_while_it_trained(
    learned: Path, scrapes: Scrapes
) -> None:
    ups = [values_of(text)["invrl_source_up"] for text in scrapes.texts[PATH]]
    assert {name for up in ups for (name,) in up} == SOURCES
    training = [up for up in ups if len(up) == len(SOURCES)]
    assert len(training) >= 5
    memory = [
        values_of(text)["invrl_process_resident_bytes"] for text in scrapes.texts[PATH]
    ]
    assert {name for sizes in memory for (name,) in sizes} == {*PROCESSES, "other"}
    assert all(
        up[("buffer",)] == up[("gateway",)] == up[("engines",)] == 1
        for up in training[:-1]
    )


def test_scraped_step_has_the_values_of_metrics_jsonl(
    learned: Path, scrapes: Scrapes
) -> None:
    rows = {
        row["step"]: row
        for row in read_metrics(learned / "metrics.jsonl")
        if "train/loss" in row
    }
    compared: set[str] = set()
    steps: set[float] = set()
    for text in scrapes.texts[PATH]:
        values = values_of(text)
        [step] = values.get("invrl_step", {(): 0.0}).values()
        if step not in rows:
            continue
        steps.add(step)
        for family in FAMILIES.values():
            if (
                family.kind != "gauge"
                or family.name == "invrl_step_end_timestamp_seconds"
            ):
                continue
            for key, value in rows[step].items():
                labels = family.label_in(key)
                if labels is not None and value is not None:
                    assert values[family.name][labels] == pytest.approx(
                        value, rel=1e-9
                    ), (step, key)
                    compared.add(family.name)
    assert len(steps) >= 3
    assert {
        "invrl_reward_mean",
        "invrl_loss",
        "invrl_logprob_gap_max",
        "invrl_canary_gap_max",
    } <= compared


def test_counters_rise_and_agree_with_the_run(learned: Path, scrapes: Scrapes) -> None:
    rows = [
        row for row in read_metrics(learned / "metrics.jsonl") if "train/loss" in row
    ]
    shown = [values_of(text) for text in scrapes.texts[PATH]]
    for name in (
        "invrl_steps_total",
        "invrl_trained_tokens_total",
        "invrl_sampled_tokens_total",
    ):
        counts = [values[name][()] for values in shown if name in values]
        assert counts == sorted(counts), name
    newest = shown[-1]
    done = newest["invrl_steps_total"][()]
    assert 0 < done <= STEPS
    trained = math.fsum(row["train/tokens"] or 0 for row in rows[: int(done)])
    assert newest["invrl_trained_tokens_total"][()] == trained
    ended = [
        values["invrl_rollouts_ended_total"]
        for values in shown
        if "invrl_rollouts_ended_total" in values
    ]
    assert ended[-1][("trained",)] > 0


def test_router_and_engine_serve_the_recorded_metric_names(
    learned: Path, scrapes: Scrapes
) -> None:
    """`tests/scraped_names.json` is what the unit test of the queries compares with."""
    recorded: dict[str, Any] = json.loads(
        (LAUNCH.parent / "tests" / "scraped_names.json").read_text()
    )
    served = scrapes.served()
    for server in recorded["servers"].values():
        for name, labels in server["labels"].items():
            if name in served:
                assert served[name] == set(labels), name
