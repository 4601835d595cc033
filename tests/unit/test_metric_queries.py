"""The dashboard and the alert rules in `launch/` ask only for metrics and labels that
exist, and the page of operations lists every metric.

What router and engines show is compared with `tests/scraped_names.json`, which was
scraped from a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from metric_queries import (
    ADDED_LABELS,
    LAUNCH,
    OF_PROMETHEUS,
    SCRAPE,
    dashboard,
    needed,
    panels,
    parsed,
    queries,
    reference_table,
    rules,
    sample_name,
    shown_labels,
)

from invrl.observe.metrics.metric_families import FAMILIES
from invrl.observe.metrics.metrics_server import PATH

ROOT = LAUNCH.parent
SCRAPED: Mapping[str, Any] = json.loads(
    (ROOT / "tests" / "scraped_names.json").read_text()
)
CONSTRAINTS = (
    (ROOT / "invrl" / "requirements" / "constraints.txt").read_text().splitlines()
)
QUERIES = list(queries())


def names_that_exist() -> dict[str, set[str]]:
    """Names of samples, each with its labels."""
    existing: dict[str, set[str]] = {}
    for family in FAMILIES.values():
        labels = set(family.labels)
        if family.kind == "histogram":
            existing[f"{family.name}_bucket"] = labels | {"le"}
            existing[f"{family.name}_sum"] = existing[f"{family.name}_count"] = labels
        else:
            existing[sample_name(family)] = labels
    for server in SCRAPED["servers"].values():
        for name, labels in server["labels"].items():
            existing[name] = set(labels)
    for name in OF_PROMETHEUS:
        existing[name] = set()
    return existing


def missing_in(query: str, shown: set[str]) -> list[str]:
    """What a query and the text beside it ask for, and no scrape has."""
    existing = names_that_exist()
    expression = parsed(query)
    missing: list[str] = []
    kept: set[str] = set()
    for name, labels in needed(expression).items():
        if name not in existing:
            missing.append(name)
            continue
        kept |= existing[name]
        missing += [
            f"{name}: {label}"
            for label in sorted(labels - existing[name] - ADDED_LABELS - {"__name__"})
        ]
    aggregated = shown_labels(expression)
    there = kept | ADDED_LABELS if aggregated is None else aggregated
    return missing + [f"text: {label}" for label in sorted(shown - there)]


@pytest.mark.parametrize(
    ("place", "query", "shown"), QUERIES, ids=[place for place, _, _ in QUERIES]
)
def test_every_name_and_label_of_a_query_exists(
    place: str, query: str, shown: set[str]
) -> None:
    assert missing_in(query, shown - {"value"}) == [], place


@pytest.mark.parametrize(
    ("query", "shown", "missing"),
    [
        ("invrl_reward", set(), ["invrl_reward"]),
        ("invrl_steps", set(), ["invrl_steps"]),
        ("invrl_gateway_request_seconds", set(), ["invrl_gateway_request_seconds"]),
        ('invrl_engines{status="lost"} > 0', set(), ["invrl_engines: status"]),
        (
            "sum by (cause) (rate(invrl_rollouts_failed_total[5m]))",
            set(),
            ["invrl_rollouts_failed_total: cause"],
        ),
        ("invrl_reward_mean and on (instance) (nothing > 0)", set(), ["nothing"]),
        ("sglang:token_usage + sglang:nothing", set(), ["sglang:nothing"]),
        ("invrl_engines", {"engine"}, ["text: engine"]),
        ("sum by (instance) (invrl_engines)", {"state"}, ["text: state"]),
        (
            "histogram_quantile(0.9, sum by (le) (rate(other_bucket[1m])))",
            set(),
            ["other_bucket"],
        ),
    ],
)
def test_unknown_metric_names_and_labels_are_found(
    query: str, shown: set[str], missing: list[str]
) -> None:
    """That the test above can fail."""
    assert missing_in(query, shown) == missing


def test_alert_rules_cover_the_listed_conditions() -> None:
    alerts = {rule["alert"]: rule for rule in rules()}
    assert len(alerts) == len(rules())
    assert {
        "InvrlRewardFlat",
        "InvrlLogprobGapHigh",
        "InvrlEnginesLost",
        "InvrlDiskNearlyFull",
        "InvrlStalenessAtBound",
    } <= set(alerts)
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_dashboard_panels_have_unique_ids_and_places() -> None:
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        for column in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert column < 24
                assert (column, y) not in cells, panel["title"]
                cells.add((column, y))
    assert all(panel["targets"] for panel in panels())
    [instance] = [
        variable
        for variable in dashboard()["templating"]["list"]
        if variable["name"] == "instance"
    ]
    assert instance["definition"] == "label_values(invrl_run_info, instance)"


def test_scrape_configuration_uses_paths_that_the_run_serves() -> None:
    configuration = yaml.safe_load(SCRAPE.read_text())
    paths = {
        job["job_name"]: job.get("metrics_path", PATH)
        for job in configuration["scrape_configs"]
    }
    assert paths == {
        "invrl": PATH,
        "invrl-router": f"{PATH}/router",
        "invrl-engine-0": f"{PATH}/engine-0",
    }
    for file in configuration["rule_files"]:
        assert (SCRAPE.parent / file).is_file()


@pytest.mark.parametrize("server", ["router", "engine"])
def test_recorded_scraped_names_are_of_the_installed_versions(server: str) -> None:
    """After an upgrade they have to be scraped again."""
    scraped = SCRAPED["servers"][server]
    assert f"{scraped['program']}=={scraped['version']}" in CONSTRAINTS


def test_metrics_page_lists_every_metric() -> None:
    page = Path(ROOT / "docs" / "observing.md").read_text()
    assert reference_table() in page, (
        "paste what metric_queries.reference_table() returns"
    )
    named = set(re.findall(r"`(invrl_\w+)", page))
    assert named <= set(names_that_exist()) | {"invrl_gateway_request_seconds"}
