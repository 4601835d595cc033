"""`invrl train` and `invrl resume`, and the inner command that their supervisor starts
as the driver."""

from collections.abc import Sequence

from invrl.cli.arguments import read_run_folder
from invrl.cli.command import CommandFailed
from invrl.cli.next_commands import print_next
from invrl.cli.run_process import checked_configuration, driver_context, log_to_folder
from invrl.run.processes import supervisor
from invrl.run.processes.driver_commands import USAGE_EXIT
from invrl.run.settings.folder import hold_run_folder
from invrl.run.settings.resolved_config import load_resolved


def train(arguments: Sequence[str]) -> None:
    """usage: invrl train --model-path FOLDER [--config FILE] [flags]

    examples:
      invrl train --config quickstart --model-path MODEL
      invrl train --model-path MODEL --rollout-function-path my_agent:rollout \\
          --task-file tasks.jsonl --num-steps 50 --lr 1e-5
      invrl train --config calculator_async --model-path MODEL --max-staleness 2

    The run folder (--run-root/--run-name) holds the resolved configuration,
    metrics.jsonl, TensorBoard events, the run's store, logs, checkpoints and the
    report."""
    config = checked_configuration(arguments, command="train")
    with hold_run_folder(config, "train") as folder:
        log_to_folder(folder, config, process="supervisor")
        exit_code = supervisor.supervise(config, folder)
        if exit_code != USAGE_EXIT:
            print_next(config, folder, finished=not exit_code)
        if exit_code:
            raise CommandFailed(exit_code)


def resume(arguments: Sequence[str]) -> None:
    """usage: invrl resume RUN_FOLDER [flags]

    Does the same as repeating the run's `invrl train` command. Flags that do not change
    the result may differ (--num-steps, --save-interval, --max-restarts,
    --log.progress); any other change of the configuration is refused."""
    folder = read_run_folder(arguments)
    load_resolved(folder.config_path)  # refuses a file that was changed
    place = ["--run-root", str(folder.path.parent), "--run-name", folder.path.name]
    train(["--config", str(folder.config_path), *place, *arguments[1:]])


def run_incarnation_in_folder(arguments: Sequence[str]) -> None:
    """usage: _incarnation RUN_FOLDER

    Runs one incarnation of the run in this folder: the driver of `invrl train`."""
    folder = read_run_folder(arguments)
    with driver_context(folder) as config:
        from invrl.run.incarnations.incarnation import run_incarnation

        run_incarnation(config, folder)
