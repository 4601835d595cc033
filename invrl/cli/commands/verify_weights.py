"""`invrl verify-weights`: checks that the engines of a live run hold its committed
weights."""

from collections.abc import Sequence

from invrl.cli.arguments import read_number, read_options, read_run_folder
from invrl.cli.command import CommandFailed
from invrl.errors import ConfigError, DeadlineError, ServerError
from invrl.run.loop.verification_socket import ask_for_verification
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.run.settings.config import Config
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder
from invrl.weights.update.verification import describe

_WAIT_S = 300.0
_SHORT_CALLS_S = 240.0
"""Seconds for pause, version and resume of one engine, in addition to the call that
hashes."""


def verify_weights(arguments: Sequence[str]) -> None:
    """usage: invrl verify-weights RUN_FOLDER [--wait SECONDS]

    Reads every parameter of every engine of a run that is running, hashes it inside the
    engine, and compares it with what the trainer sent for the committed version. Prints
    a line per engine: version, tensors, bytes, whether they are equal, and how long the
    engine was paused. One engine after the other is paused between two of its steps;
    its requests then go on as they were.

      --wait SECONDS   for a weight update that is in progress (default: 300)

    Exit code 0 if all engines hold the committed weights, 1 if one does not or could
    not be read."""
    folder = read_run_folder(arguments)
    wait_s = read_number(
        "--wait",
        read_options(arguments[1:], ["--wait"]).get("--wait", str(_WAIT_S)),
        reason="not a number of seconds",
        fix="give --wait 300, for example",
    )
    _check_running(folder)
    config = load_resolved(folder.config_path)
    try:
        verification = ask_for_verification(
            folder, wait_s=wait_s, deadline_s=_deadline_s(config, wait_s)
        )
    except (ServerError, DeadlineError) as error:
        print(f"invrl: {error}")
        raise CommandFailed(FAILURE_EXIT) from error
    print(describe(verification))
    if not verification.all_equal:
        raise CommandFailed(FAILURE_EXIT)


def _check_running(folder: RunFolder) -> None:
    """Raise ConfigError unless a command works in the folder and has committed
    weights."""
    if not folder.is_held():
        reason = "no run works in this folder, so it has no engines"
        raise ConfigError(
            "RUN", str(folder.path), reason, "start it, or `invrl resume` it"
        )
    if not folder.verification_path.exists():
        reason = "it has not committed a version of the weights yet, or has none to commit (serve, eval)"
        raise ConfigError("RUN", str(folder.path), reason, "wait for its first step")


def _deadline_s(config: Config, wait_s: float) -> float:
    """Return a deadline beyond the driver's own, so that the driver answers first."""
    per_engine_s = config.weights.timeout_s + _SHORT_CALLS_S
    return wait_s + config.engine.total_engines * per_engine_s
