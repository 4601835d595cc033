"""`invrl replay`, and the inner command that its supervisor starts as the driver."""

from collections.abc import Sequence

from invrl.cli.arguments import read_options, read_run_folder
from invrl.cli.checks.model_checks import check_model
from invrl.cli.command import CommandFailed
from invrl.cli.run_process import driver_of, log_to_folder
from invrl.errors import ConfigError
from invrl.host import interrupts
from invrl.run.processes import supervisor
from invrl.run.processes.driver_commands import REPLAY_COMMAND
from invrl.run.settings.resolved_config import load_resolved


def replay(arguments: Sequence[str]) -> None:
    """usage: invrl replay RUN_FOLDER --step N

    Needs the batch of step N (train with --save-rollout-data) and the checkpoint of
    step N - 1. Writes RUN_FOLDER/replay/step-N: tokens.jsonl (ids, text, versions,
    log-probs of engine and trainer before and after the step, advantages) and
    result.json (the step's metrics beside the recorded ones)."""
    folder = read_run_folder(arguments)
    options = read_options(arguments[1:], ["--step"])
    step = options.get("--step", "")
    if not step.isdecimal() or int(step) < 1:
        raise ConfigError("--step", step, "not a step", "give --step N, from 1 on")
    config = load_resolved(folder.config_path)
    check_model(config)
    with folder.held("replay"):
        log_to_folder(folder, config, process="supervisor")
        exit_code = supervisor.supervise_once(config, folder, REPLAY_COMMAND, step)
        if exit_code:
            raise CommandFailed(exit_code)


def replay_step_in_folder(arguments: Sequence[str]) -> None:
    """usage: _replay RUN_FOLDER STEP

    Repeats one step of the run in this folder: the driver of `invrl replay`."""
    folder = read_run_folder(arguments)
    step = int(arguments[1])
    with driver_of(folder) as config:
        from invrl.run.replay import replay as replay_step

        summary = interrupts.run(replay_step(config, folder, step))
        print(summary)
