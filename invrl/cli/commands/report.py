"""`invrl report`: the pages of `invrl view --export`, written into the run's folder."""

import contextlib
import shutil
from collections.abc import Sequence

from invrl.cli.arguments import read_run_folder
from invrl.cli.commands.view import EXPORTED_ROLLOUTS, default_settings, say
from invrl.cli.next_commands import describe_next
from invrl.errors import ConfigError
from invrl.host.files.cache_folder import cache_folder
from invrl.run.settings.resolved_config import load_resolved


def report(arguments: Sequence[str]) -> None:
    """usage: invrl report RUN_FOLDER

    Writes the pages of `invrl view RUN_FOLDER --export` into report/pages of the
    folder, anew each time, also of a run that failed: what it gained, charts, rollouts,
    failures, settings. They open from disk and load nothing, to keep or to send to
    someone. Prints their path and the next commands."""
    from invrl.viewer.export import export_runs
    from invrl.viewer.viewed_run import open_runs

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
