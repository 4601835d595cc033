"""The page's views of a whole run: ledger, evaluations, weights, processes over time,
settings."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from invrl.buffer.ledger.ledger_store import (
    Incarnation,
    check_lineage,
    first_lost_sequences,
    incarnations_in,
    ledger_in,
)
from invrl.errors import (
    BufferStateError,
    RunStoreError,
)
from invrl.observe.metrics.metrics_table import Point
from invrl.store.rows import outcome_from_json
from invrl.store.timeline_file import read_timeline
from invrl.types.rollouts import FailedRollout
from invrl.viewer.held_out_gains import Rewards, held_out_gains
from invrl.viewer.rollout_queries import Page, Parameters, RolloutQueries
from invrl.viewer.viewed_run import ViewedRun

_LAST_STATES = """
    SELECT state, reason, failure, ends, COUNT(*) FROM (
        SELECT state, reason, failure, SUM(state IN ('trained', 'dropped')) AS ends,
            MAX((incarnation << 44) | sequence)  -- the row of the maximum gives the other columns
        FROM ledger WHERE {surviving} GROUP BY group_id, "index", attempt)
    GROUP BY state, reason, failure, ends
"""
_BATCHES = """
    SELECT COUNT(DISTINCT batch_id), COALESCE(MAX(batch_id), -1) FROM ledger
    WHERE state='trained' AND ({surviving})
"""
_MAX_FAILURES = 5_000
"""Newest failed rollouts whose texts are read."""
_SESSIONS_SHOWN = 10
_PASS_AT = re.compile(r"pass_at_(\d+)")
_SCORES = (
    "samples",
    "failed",
    "reward_mean",
    "reward_mean_low",
    "reward_mean_high",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
)
Row = dict[str, Any]
RunPage = Callable[[ViewedRun, Parameters, Page], Row]

# ----------------------------------------------------------------- the ledger


def ledger_page(run: ViewedRun) -> Row:
    """Return where every rollout ended, and why. Raises DamagedFileError or
    RunStoreError."""
    with run.store.reading() as db:
        incarnations = incarnations_in(db)
        lost = _lost_counts(db, incarnations)
        bounds = _surviving(first_lost_sequences(incarnations))
        places = db.execute(_LAST_STATES.format(surviving=bounds)).fetchall()
        [batches, newest] = db.execute(_BATCHES.format(surviving=bounds)).fetchone()
        lineage = "ok"
        has_ended = run.folder.finished_path.exists()
        # The full check reads every entry, so it runs only to name a broken invariant.
        if batches != newest + 1 or any(
            _is_broken(state, ends, has_ended) for state, _, _, ends, _ in places
        ):
            try:
                check_lineage(ledger_in(db), ended=has_ended)
            except BufferStateError as error:
                lineage = str(error)
    counts: Counter[tuple[str, str | None, str | None]] = Counter()
    for state, reason, failure, _, count in places:
        counts[state, reason, failure] += count
    return {
        "incarnations": [
            {**asdict(incarnation), "lost": lost[incarnation.number]}
            for incarnation in incarnations
        ],
        "counts": [
            {"state": state, "reason": reason, "failure": failure, "count": count}
            for (state, reason, failure), count in counts.most_common()
        ],
        "lineage": lineage,
        "failures": _failures(run),
    }


def _surviving(lost_from: Mapping[int, float]) -> str:
    """Return a condition on the entries of the surviving lineage. `lost_from`: see
    `first_lost_sequences`."""
    bounds: list[str] = []
    for number, bound in lost_from.items():
        condition = f"incarnation={number}"
        if math.isfinite(bound):
            condition += f" AND sequence<{int(bound)}"
        bounds.append(f"({condition})")
    return " OR ".join(bounds) or "0"


def _is_broken(state: str, ends: int, has_ended: bool) -> bool:
    """Whether a place with this last state and number of ends breaks what
    `check_lineage` checks."""
    if ends > 1 or (ends == 1 and state not in ("trained", "dropped")):
        return True
    return has_ended and ends == 0


def _failures(run: ViewedRun) -> list[Row]:
    """Return failed rollouts by reason and last line of their message, the most
    frequent first."""
    with run.queries() as queries:
        failed_ids = [session_id for session_id, _ in queries.failures()][
            :_MAX_FAILURES
        ]
    kinds: dict[tuple[str, str], Row] = {}
    sql = (
        "SELECT id, outcome FROM sessions WHERE id IN (SELECT value FROM json_each(?))"
    )
    with run.store.reading() as db:
        for session_id, body in db.execute(sql, (json.dumps(failed_ids),)):
            outcome = outcome_from_json(body)
            if not isinstance(outcome, FailedRollout):
                continue
            reason = str(outcome.reason)
            line = outcome.detail.strip().rpartition("\n")[2][:300]
            kind = kinds.setdefault((reason, line), {"count": 0, "session_ids": []})
            if not kind["count"]:
                kind |= {"failure": reason, "line": line, "detail": outcome.detail}
            kind["count"] += 1
            kind["session_ids"].append(session_id)
    for kind in kinds.values():
        del kind["session_ids"][_SESSIONS_SHOWN:]
    return sorted(kinds.values(), key=lambda kind: -kind["count"])


# ----------------------------------------------------------------- evaluations


def evaluations_page(run: ViewedRun, page: Page) -> Row:
    """Return scores over steps, gains, and the rewards of held-out tasks."""
    names = [name for name in run.metrics.names() if name.startswith("eval/")]
    scores: dict[tuple[int, str], Row] = {}
    for name, points in run.metrics.series(names).items():
        evaluation, _, measure = name.removeprefix("eval/").rpartition("/")
        if not evaluation:
            continue  # the held-out loss of a run on a file
        for step, _, value in points:
            score = scores.setdefault(
                (step, evaluation), _empty_score(step, evaluation)
            )
            _put_measure(score, measure, value)
    rewards = _held_out_rewards(run)
    tasks = _task_rows(rewards)
    end = len(tasks) if page.limit < 0 else page.offset + page.limit
    ordered = [scores[key] for key in sorted(scores)]
    return {
        "scores": ordered,
        "gains": held_out_gains(ordered, rewards),
        "tasks": {"total": len(tasks), "rows": tasks[page.offset : end]},
    }


def _empty_score(step: int, evaluation: str) -> Row:
    return {"step": step, "name": evaluation, **dict.fromkeys(_SCORES), "pass_at": {}}


def _put_measure(score: Row, measure: str, value: float | None) -> None:
    if measure in ("samples", "failed"):
        score[measure] = None if value is None else int(value)
        return
    if measure in _SCORES:
        score[measure] = value
        return
    base, _, bound = measure.rpartition("_")
    place = {"low": 1, "high": 2}.get(bound, 0)
    matched = _PASS_AT.fullmatch(base if place else measure)
    if matched:
        score["pass_at"].setdefault(matched[1], [None, None, None])[place] = value


def _held_out_rewards(run: ViewedRun) -> Rewards:
    """Return the rewards; empty as long as there is no index."""
    try:
        with run.queries() as queries:
            return queries.held_out_rewards()
    except RunStoreError:
        return {}


def _task_rows(rewards: Rewards) -> list[Row]:
    """Return one row for every held-out task, those that changed most first."""
    rows: list[Row] = []
    for (task_id, name), by_step in rewards.items():
        steps = sorted(by_step, key=int)
        first = _mean(by_step[steps[0]])
        last = _mean(by_step[steps[-1]])
        gain = None
        if len(steps) > 1 and first is not None and last is not None:
            gain = last - first
        rows.append(
            {"task_id": task_id, "name": name, "by_step": by_step, "gain": gain}
        )
    return sorted(
        rows, key=lambda row: (-abs(row["gain"] or 0.0), row["name"], row["task_id"])
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known)


# -------------------------------------------------------------- weights and processes


def weights_page(run: ViewedRun) -> Row:
    """Return the updates of the engines' weights, and the metrics of the engines."""
    names = run.metrics.names()
    updates: dict[int, Row] = {}
    for name, points in run.metrics.series(
        name for name in names if name.startswith("sync/")
    ).items():
        measure = name.removeprefix("sync/")
        for step, moment, value in points:
            update = updates.setdefault(
                step,
                {
                    "step": step,
                    "time": moment,
                    "version": None,
                    "bytes": None,
                    "seconds": {},
                    "canary_max_gap": None,
                    "canary_mean_gap": None,
                },
            )
            if measure.endswith("_s"):
                update["seconds"][measure.removesuffix("_s")] = value
            elif measure == "version":
                update["version"] = None if value is None else int(value)
            elif measure in update:
                update[measure] = value
    engines = run.metrics.series(
        name for name in names if name.startswith(("engine", "fleet"))
    )
    return {
        "updates": [updates[step] for step in sorted(updates)],
        "engines": engines,
    }


def _lost_counts(db: Any, incarnations: Sequence[Incarnation]) -> dict[int, int]:
    sql = "SELECT COUNT(*) FROM ledger WHERE incarnation=? AND sequence>=?"
    lost_from = first_lost_sequences(incarnations)
    counts: dict[int, int] = {}
    for incarnation in incarnations:
        number = incarnation.number
        found = db.execute(sql, (number, lost_from.get(number, 0)))
        [counts[number]] = found.fetchone()
    return counts


def timeline_page(run: ViewedRun) -> Row:
    """Return the run's spans over time, and the samples of its processes."""
    timeline = read_timeline(run.folder.path)
    phase = run.phase()
    now = None
    if run.folder.is_worked_in() and phase:
        now = {"phase": phase.name, "step": phase.step}
    return {
        "starts": timeline.starts,
        "spans": timeline.spans,
        "samples": timeline.samples,
        "now": now,
    }


# ----------------------------------------------------------------- all of one run


def _rollouts(run: ViewedRun, parameters: Parameters, page: Page) -> Row:
    with run.queries() as queries:
        found = queries.rollouts(parameters, page)
    if found["searched"] is not None:
        found["searched"]["turns"] = run.index_state.turns
    return found


def _indexed(query: Callable[[RolloutQueries, Parameters, Page], Row]) -> RunPage:
    """Return the page of a response from the index."""

    def build_page(run: ViewedRun, parameters: Parameters, page: Page) -> Row:
        with run.queries() as queries:
            return query(queries, parameters, page)

    return build_page


RUN_PAGES: Mapping[str, RunPage] = {
    "timeline": lambda run, *_: timeline_page(run),
    "weights": lambda run, *_: weights_page(run),
    "evaluations": lambda run, _, page: evaluations_page(run, page),
    "ledger": lambda run, *_: ledger_page(run),
    "steps": _indexed(lambda queries, *_: queries.steps()),
    "groups": _indexed(RolloutQueries.groups),
    "rollouts": _rollouts,
    "facets": _indexed(lambda queries, parameters, _: queries.facets(parameters)),
    "tasks": _indexed(RolloutQueries.tasks),
}
"""Pages by the last part of the path `/api/runs/{run}/...`. A page raises InvrlError if
the run lacks what it needs."""


# ----------------------------------------------------------------- several runs


def configurations_page(runs: Sequence[ViewedRun]) -> Row:
    """Return the settings of each run, those that differ from their defaults, and those
    that differ between runs."""
    by_run = {run.id: run.settings() for run in runs}
    flat = {
        run_id: {
            f"{section}.{key}": value
            for section, table in tables.items()
            for key, value in table.items()
        }
        for run_id, tables in by_run.items()
    }
    differences: list[Row] = []
    for key in sorted(set[str]().union(*flat.values())):
        values = {run_id: settings.get(key) for run_id, settings in flat.items()}
        texts = {
            json.dumps(value, default=str, sort_keys=True) for value in values.values()
        }
        if len(texts) > 1:
            differences.append({"key": key, "values": values})
    changed = {run.id: run.changed_settings() for run in runs}
    return {"runs": by_run, "differences": differences, "changed": changed}


def metric_names_page(runs: Sequence[ViewedRun], text: str) -> Row:
    """Return every name that contains `text`, with the runs that have it."""
    rows: dict[str, Row] = {}
    for run in runs:
        for name, last in run.metrics.names().items():
            if text.lower() not in name.lower():
                continue
            row = rows.setdefault(name, {"name": name, "runs": []})
            row["runs"].append(run.id)
            row["last"] = last
    return {"names": [rows[name] for name in sorted(rows)]}


def metrics_page(runs: Sequence[ViewedRun], names: Sequence[str] | None) -> Row:
    """Return the points of these metrics in each run; `names` None: of all."""
    series: dict[str, dict[str, list[Point]]] = {}
    for run in runs:
        series[run.id] = (
            run.metrics.all_series() if names is None else run.metrics.series(names)
        )
    return {"runs": series}
