"""The queries of the dashboard and of the alert rules in `launch/`, and what they need
of a scrape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from invrl.observe.metrics.metric_families import FAMILIES, Family

LAUNCH = Path(__file__).parents[1] / "launch"
DASHBOARD = LAUNCH / "grafana" / "dashboard.json"
ALERTS = LAUNCH / "prometheus" / "alerts.yml"
SCRAPE = LAUNCH / "prometheus" / "prometheus.yml"
OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""
ADDED_LABELS = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""
_VARIABLES = {"$__rate_interval": "1m", "$instance": "127.0.0.1:9464"}
_LABEL_IN_TEXT = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def panels() -> list[dict[str, Any]]:
    """Those with queries."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(ALERTS.read_text())["groups"]
        for rule in group["rules"]
    ]


def queries() -> Iterator[tuple[str, str, set[str]]]:
    """Where a query stands, the query, and the labels that the text shown with it
    names."""
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in _VARIABLES.items():
                text = text.replace(name, value)
            yield (
                f"panel {panel['title']}",
                text,
                set(_LABEL_IN_TEXT.findall(target["legendFormat"])),
            )
    for rule in rules():
        shown = " ".join(rule["annotations"].values())
        yield f"alert {rule['alert']}", rule["expr"], set(_LABEL_IN_TEXT.findall(shown))


def parsed(query: str) -> Any:
    """Raises ValueError for what is not PromQL."""
    return promql_parser.parse(query)


def needed(expression: Any) -> dict[str, set[str]]:
    """The metrics that a query reads, each with the labels that it selects by or groups
    by."""
    found: dict[str, set[str]] = {}
    for node in _walk(expression):
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name, "a query names its metric"
            labels = {matcher.name for matcher in node.matchers.matchers}
            found.setdefault(node.name, set()).update(labels)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            for name, labels in needed(node.expr).items():
                found.setdefault(name, set()).update(labels | set(node.modifier.labels))
    return found


def shown_labels(expression: Any) -> set[str] | None:
    """The labels that the result keeps if it is an aggregate; None if it keeps those of
    its metric."""
    for node in _walk(expression):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            return set(node.modifier.labels)
    return None


def scraped(text: str) -> Mapping[str, set[str]]:
    """The names of the samples in a scrape, each with all labels that they have."""
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for field in ("lhs", "rhs", "expr", "vector_selector", "param"):
        inner = getattr(node, field, None)
        if inner is not None and type(inner).__module__ == type(node).__module__:
            yield from _walk(inner)
    for argument in getattr(node, "args", ()):
        yield from _walk(argument)


def reference_table() -> str:
    """All families as a table in Markdown, as the documentation shows them."""
    lines = ["| metric | kind | labels | unit | meaning |", "|---|---|---|---|---|"]
    for family in FAMILIES.values():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        columns = [
            f"`{sample_name(family)}`",
            family.kind,
            labels,
            family.unit,
            family.help,
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def sample_name(family: Family) -> str:
    """The family's name in queries; of a histogram without `_bucket`, `_sum` and
    `_count`."""
    return f"{family.name}_total" if family.kind == "counter" else family.name
