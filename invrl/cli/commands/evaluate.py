"""`invrl eval`, and the inner command that its supervisor starts as the driver."""

from collections.abc import Sequence

from invrl.cli.arguments import read_run_folder
from invrl.cli.command import CommandFailed
from invrl.cli.next_commands import print_next
from invrl.cli.run_process import checked_configuration, driver_of, log_to_folder
from invrl.host import interrupts
from invrl.run.processes import supervisor
from invrl.run.processes.driver_commands import EVALUATION_COMMAND, USAGE_EXIT
from invrl.run.settings.folder import hold_run_folder


def evaluate(arguments: Sequence[str]) -> None:
    """usage: invrl eval --model-path FOLDER [--config FILE] [flags]

    Rollouts run through the gateway exactly as in training. Tasks: --eval-sets, or
    --task-file, or the split 'eval' of --task-source-path; --no-eval-tasks takes all of
    them. Prints a table (mean reward, accuracy, pass@k, 95 % intervals) and writes
    report/eval.json into the run folder.

    examples:
      invrl eval --model-path MODEL --config quickstart --eval-samples-per-task 8
      invrl eval --model-path runs/a/checkpoints/step-000012 \\
          --rollout-function-path my_agent:rollout \\
          --eval-sets easy=easy.jsonl,hard=my_tasks:hard --eval-modes sampled"""
    config = checked_configuration(arguments, command="eval")
    with hold_run_folder(config, "eval") as folder:
        log_to_folder(folder, config, process="supervisor")
        exit_code = supervisor.supervise_once(config, folder, EVALUATION_COMMAND)
        if exit_code != USAGE_EXIT:
            print_next(config, folder, finished=True)
        if exit_code:
            raise CommandFailed(exit_code)


def run_evaluation_in_folder(arguments: Sequence[str]) -> None:
    """usage: _evaluation RUN_FOLDER

    Runs the evaluation in this folder: the driver of `invrl eval`."""
    folder = read_run_folder(arguments)
    with driver_of(folder) as config:
        from invrl.run.evaluate import run_evaluation

        interrupts.run(run_evaluation(config, folder))
