"""`invrl view`: the page of one or several runs, live or dead. `invrl report`: the same
pages, written into the run's folder."""

import asyncio
import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from invrl.cli.arguments import read_arguments, read_run_folder, read_whole
from invrl.cli.next_commands import describe_next
from invrl.errors import ConfigError
from invrl.host.files.cache_folder import cache_folder
from invrl.host.output.printable import printable
from invrl.run.settings.resolved_config import load_resolved
from invrl.viewer.access import access_for
from invrl.viewer.page_server import bind, serve
from invrl.viewer.viewed_run import open_runs

_VALUES = ("--host", "--port", "--export", "--export-rollouts")
_NO_OPEN = "--no-open"
EXPORTED_ROLLOUTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewRequest:
    """Arguments of the command."""

    runs: tuple[Path, ...]
    host: str
    port: int
    export: Path | None
    export_rollouts: int
    opens_browser: bool


def view(arguments: Sequence[str]) -> None:
    """usage: invrl view RUN_FOLDER [RUN_FOLDER ...] [--host ADDRESS] [--port N] [--no-open]
           invrl view RUN_FOLDER [RUN_FOLDER ...] --export FOLDER [--export-rollouts N]
      --host ADDRESS       where to listen (default: 127.0.0.1, this machine only). Whoever has the
                           printed URL can read the runs; over ssh, forward the port: ssh -L
      --port N             default: a free one
      --no-open            do not open a browser
      --export FOLDER      write pages that open from disk into a new folder, instead of serving
      --export-rollouts N  conversations in the export, of each run: the best, the worst and the most
                           surprising (default: 200; 0: all). The rows of all rollouts are in it
    Shows metrics, rollouts, conversations, tokens, the ledger, evaluations and processes of runs.
    Reads only; a run that is live may go on, and the page follows it. What is computed for fast
    answers is kept below ~/.cache/invrl/viewer (XDG_CACHE_HOME). Ctrl-C ends it."""
    request = read_request(arguments)
    runs = open_runs(request.runs, cache_folder(), default_settings)
    if request.export is not None:
        from invrl.viewer.export import export_runs

        page = export_runs(
            runs, request.export, rollouts=request.export_rollouts, say=say
        )
        say(f"written: {page}")
        return
    listener = bind(request.host, request.port)
    port = listener.getsockname()[1]
    access = access_for(request.host, port)
    shown_host = "127.0.0.1" if request.host in ("0.0.0.0", "::") else request.host
    if ":" in shown_host:
        shown_host = f"[{shown_host}]"
    url = f"http://{shown_host}:{port}/?key={access.key}"
    names = ", ".join(run.folder.path.name for run in runs)
    say(f"{names}: {url}\nCtrl-C ends it.")
    if request.opens_browser:
        _open_browser(url)
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(runs, access, listener))


def read_request(arguments: Sequence[str]) -> ViewRequest:
    """Return the request. Raises ConfigError for a flag that is unknown or has a wrong
    value, and if no run is named."""
    options, paths = read_arguments(arguments, _VALUES, [_NO_OPEN])
    if not paths:
        raise ConfigError(
            "RUN", "", "it is missing", "give the folder that `invrl train` printed"
        )
    export = options.get("--export")
    return ViewRequest(
        runs=tuple(Path(path) for path in paths),
        host=options.get("--host", "127.0.0.1"),
        port=_read_number("--port", options.get("--port", "0"), most=65_535),
        export=Path(export).expanduser().absolute() if export is not None else None,
        export_rollouts=_read_number(
            "--export-rollouts",
            options.get("--export-rollouts", str(EXPORTED_ROLLOUTS)),
            most=10**9,
        ),
        opens_browser=_NO_OPEN not in options,
    )


def _read_number(flag: str, text: str, *, most: int) -> int:
    reason = f"not a number from 0 to {most}"
    return read_whole(flag, text, reason=reason, fix=f"write {flag} N", most=most)


@cache
def default_settings() -> Mapping[str, Mapping[str, Any]]:
    """Return every setting of a run without flags, as a run's folder keeps it, and
    those of each optional table for a run that has only the table."""
    from invrl.run.settings import config

    of_tables = {name: config.default_settings(name) for name in config.TABLES}
    return of_tables | config.resolve().settings()


def say(line: str) -> None:
    print(printable(line), flush=True)


def _open_browser(url: str) -> None:
    """Open the URL on a desktop. Over ssh and in containers there is none, and the
    printed URL suffices."""
    import os
    import webbrowser

    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        return
    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(url)


def report(arguments: Sequence[str]) -> None:
    """usage: invrl report RUN_FOLDER

    Writes the pages of `invrl view RUN_FOLDER --export` into report/pages of the
    folder, anew each time, also of a run that failed: what it gained, charts, rollouts,
    failures, settings. They open from disk and load nothing, to keep or to send to
    someone. Prints their path and the next commands."""
    from invrl.viewer.export import export_runs

    folder = read_run_folder(arguments)
    if len(arguments) != 1:
        raise ConfigError(
            "report", list(arguments), "it takes one run folder", "give one"
        )
    pages = folder.report_path / "pages"
    unfinished = folder.report_path / "pages.unfinished"
    folder.report_path.mkdir(exist_ok=True)
    shutil.rmtree(unfinished, ignore_errors=True)
    runs = open_runs([folder.path], cache_folder(), default_settings)
    export_runs(runs, unfinished, rollouts=EXPORTED_ROLLOUTS, say=say)
    shutil.rmtree(pages, ignore_errors=True)
    unfinished.rename(pages)
    say(f"written: {pages / 'index.html'}")
    if folder.is_worked_in():
        return
    with contextlib.suppress(ConfigError, OSError):  # of another version, or damaged
        config = load_resolved(folder.config_path)
        finished = folder.finished_path.exists()
        commands = describe_next(config, folder, finished=finished)
        if commands:
            print(commands)
