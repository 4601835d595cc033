"""`invrl report`: draws the reward curve of a run folder."""

from collections.abc import Sequence
from pathlib import Path

from invrl.errors import ConfigError
from invrl.observe.report import trainer_memory, write_report


def report(arguments: Sequence[str]) -> None:
    """usage: invrl report RUN_FOLDER

    Draws the reward curve of a run, also of one that failed. Writes report/reward.png into the folder
    and prints its path, and the trainer's memory as it was measured and estimated."""
    if len(arguments) != 1:
        raise ConfigError("report", list(arguments), "it takes one run folder", "give one")
    run_folder = Path(arguments[0]).expanduser()
    picture = write_report(run_folder)
    print(picture)
    memory = trainer_memory(run_folder)
    if memory:
        print(memory)
