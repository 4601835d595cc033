"""A recorded run as the index of `invrl view` shows it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from recorded_run import RecordedRun

from invrl.viewer.page_server import runs_page
from invrl.viewer.viewed_run import ViewedRun, open_runs


def refreshed(run: ViewedRun) -> ViewedRun:
    """The run, once its index is complete."""
    never = threading.Event()
    for _ in range(1_000):
        if "index" not in run.refresh(never):
            return run
    raise AssertionError("the index is never complete")


def rollout_rows(run: ViewedRun, **filters: object) -> list[dict[str, Any]]:
    parameters = {name: [str(value)] for name, value in filters.items()}
    with run.queries() as queries:
        return queries.rollouts(parameters)["rows"]


def session_ids(run: ViewedRun, **filters: object) -> set[str]:
    return {row["session_id"] for row in rollout_rows(run, **filters)}


def closed(recorded: RecordedRun) -> Path:
    """The folder of a recorded run whose files nothing holds open."""
    recorded.writer.close()
    recorded.ledger.close()
    return recorded.folder.path


def view_of(folder: Path, cache: Path) -> ViewedRun:
    [run] = open_runs([folder], cache)
    return refreshed(run)


def notes_of(run: ViewedRun) -> str:
    [row] = runs_page([run])["runs"]
    return "\n".join(row["notes"])
