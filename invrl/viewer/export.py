"""Writes the page and the data of runs as files that open from disk, without a server,
to send to someone.

A browser lets a page from disk read only scripts. So each response of the server
becomes a script that hands it to the page, and `data/manifest.js` names them all.
Recipients of the folder can read its conversations.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from invrl import __version__
from invrl.errors import ConfigError, InvrlError
from invrl.viewer.conversation_page import rollout_detail
from invrl.viewer.last_replies import last_replies
from invrl.viewer.page_server import PAGE_FOLDER, encoded, runs_page
from invrl.viewer.rollout_queries import EVERY_ROW, RolloutQueries
from invrl.viewer.run_pages import (
    RUN_PAGES,
    configurations_page,
    metric_names_page,
    metrics_page,
)
from invrl.viewer.search_words import SearchTextWriter
from invrl.viewer.turn_tokens import turn_tokens
from invrl.viewer.viewed_run import ViewedRun

_ORDERS = ("best", "worst", "surprising", "opened_at")
"""Orders whose first rollouts are exported with their conversations, in turns."""
_NO_PAGE = ("README.md",)

Say = Callable[[str], None]


def export_runs(
    runs: Sequence[ViewedRun], folder: Path, *, rollouts: int, say: Say
) -> Path:
    """Write into `folder`, which must not exist or be empty, and return the page to
    open. `rollouts`: conversations of each run; 0: all. `say` receives the progress.
    Raises ConfigError if the folder cannot be written."""
    _make_folder(folder)
    for run in runs:
        _index_whole(run, say)
    writer = _ScriptWriter(folder / "data")
    left_out: dict[str, int] = {}
    writer.write("runs", runs_page(runs))
    writer.write("config", configurations_page(runs))
    writer.write("metric-names", metric_names_page(runs, ""))
    writer.write("metrics", metrics_page(runs, None))
    for run in runs:
        for name, page in RUN_PAGES.items():
            with contextlib.suppress(InvrlError):  # the run's notes say why
                writer.write(f"runs/{run.id}/{name}", page(run, {}, EVERY_ROW))
        left_out[run.id] = _write_rollouts(run, writer, rollouts, say)
    manifest = {
        "created": time.time(),
        "version": __version__,
        "files": writer.files,
        "left_out": left_out,
    }
    (folder / "data" / "manifest.js").write_bytes(
        b"window.invrlExport = " + _literal(manifest) + b";\n"
    )
    return folder / "index.html"


def _make_folder(folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                "--export",
                str(folder),
                "it exists and is not empty",
                "name a new folder",
            )
        shutil.copytree(
            PAGE_FOLDER,
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(*_NO_PAGE, "__pycache__"),
        )
        (folder / "data").mkdir(exist_ok=True)
    except OSError as error:
        fix = "name a folder that can be written"
        raise ConfigError(
            "--export", str(folder), f"it cannot be written: {error}", fix
        ) from error


def _index_whole(run: ViewedRun, say: Say) -> None:
    """Fill the index up to the run's current end."""
    never = threading.Event()
    told = time.monotonic()
    while "index" in run.refresh(never):
        if time.monotonic() - told > 2.0:
            told = time.monotonic()
            state = run.index_state
            say(
                f"{run.id}: {state.rollouts_indexed:,} of {state.rollouts:,} rollouts and "
                f"{state.turns_indexed:,} of {state.turns:,} turns indexed"
            )
    run.close()


def _write_rollouts(run: ViewedRun, writer: _ScriptWriter, count: int, say: Say) -> int:
    """Write conversations and tokens. Returns the number of rollouts left out."""
    try:
        with run.queries() as queries:
            orders = [_ids_in_order(queries, order) for order in _ORDERS]
    except InvrlError:
        return 0
    total = len(orders[0])
    chosen = _in_turns(orders, count or total)
    tasks: set[str] = set()
    said = SearchTextWriter(writer.write, f"runs/{run.id}/said")
    for number, session_id in enumerate(chosen, 1):
        detail = rollout_detail(run, session_id, full=True)
        if detail is None:
            continue
        writer.write(f"runs/{run.id}/rollouts/{session_id}", detail)
        tasks.add(detail["row"]["task"])
        said.add(session_id, detail["turns"])
        for turn in detail["turns"]:
            tokens = turn_tokens(run, turn["id"], full=True)
            writer.write(f"runs/{run.id}/turns/{turn['id']}/tokens", tokens)
        if number % 100 == 0:
            say(f"{run.id}: {number:,} of {len(chosen):,} conversations written")
    said.close()
    for task in sorted(tasks):
        writer.write(
            f"runs/{run.id}/replies/{task}", last_replies(run, task, only=set(chosen))
        )
    return total - len(chosen)


def _ids_in_order(queries: RolloutQueries, order: str) -> list[str]:
    rows = queries.rollouts({"sort": (order,)}, EVERY_ROW)["rows"]
    return [row["session_id"] for row in rows]


def _in_turns(orders: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return the first `count` different ids: the first of each order, the second of
    each, and so on."""
    chosen: dict[str, None] = {}
    for first_of_each in zip(*orders, strict=True):
        for session_id in first_of_each:
            if len(chosen) < count:
                chosen[session_id] = None
    return list(chosen)


class _ScriptWriter:
    """Writes one script per response. Their names are numbers, because ids may contain
    anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, str] = {}
        """Files by the path of the API, without its `api/`."""

    def write(self, path: str, body: Any) -> None:
        name = f"{len(self.files) + 1:06d}.js"
        script = (
            b"window.invrlData(" + _literal(path) + b", " + _literal(body) + b");\n"
        )
        (self._folder / name).write_bytes(script)
        self.files[path] = f"data/{name}"


def _literal(body: Any) -> bytes:
    """Encode as a JavaScript literal that ends no script element, wherever the text is
    put."""
    return encoded(body).replace(b"<", b"\\u003c")
