"""`invrl report`: the report of a run folder, as one HTML file and as a picture of its
rewards."""

from collections.abc import Sequence
from pathlib import Path

from invrl.cli.next_commands import next_commands
from invrl.errors import ConfigError
from invrl.host.disk import write_atomically
from invrl.observe.report import has_curve, trainer_memory, write_report
from invrl.observe.report_page import page
from invrl.run.report_contents import read_contents
from invrl.run.resolved_config import load_resolved
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder


def report(arguments: Sequence[str]) -> None:
    """usage: invrl report RUN_FOLDER

    Writes report/report.html into the folder, also of a run that failed: curves,
    held-out results with their intervals, failed rollouts by reason, settings that
    differ from their defaults, versions and the next commands. It is one file that
    loads nothing, to keep or to send to someone. Draws report/reward.png too, if there
    are rewards or held-out results. Prints their paths, and the trainer's memory as it
    was measured and estimated."""
    if len(arguments) != 1:
        raise ConfigError(
            "report", list(arguments), "it takes one run folder", "give one"
        )
    run_folder = Path(arguments[0]).expanduser()
    folder = RunFolder(path=run_folder.absolute())
    has_rewards = has_curve(read_metrics(folder.metrics_path))
    if has_rewards or not folder.config_path.exists():
        print(write_report(run_folder))  # refuses a folder that is no run's
    print(_write_page(folder))
    memory = trainer_memory(run_folder)
    if memory:
        print(memory)


def _write_page(folder: RunFolder) -> Path:
    config = None
    commands: list[tuple[str, str]] = []
    try:
        config = load_resolved(folder.config_path)
        finished = folder.finished_path.exists()
        found = (
            []
            if folder.is_worked_in()
            else next_commands(config, folder, finished=finished)
        )
        commands = [(command.text, command.purpose) for command in found]
    except (ConfigError, OSError):
        pass  # of another version, or damaged: the page says which settings it cannot show
    path = folder.report_path / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(read_contents(folder, config, commands)))
    return path
