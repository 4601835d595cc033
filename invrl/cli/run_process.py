"""Shared parts of the commands that start or drive a run: the checked configuration,
the driver's log, and the two lines that a failed run prints."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from invrl.cli.checks import machine
from invrl.cli.checks.checklist import check_before_start
from invrl.cli.command import CommandFailed
from invrl.cli.command_settings import settings_for_command
from invrl.cli.error_summary import summarize_error
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, DamagedFileError, IdenticalFailuresError
from invrl.host.files.private_file import make_private
from invrl.host.output.log_lines import write_log_lines
from invrl.host.output.printable import printable
from invrl.host.processes import fork_parent, interrupts, lifeline
from invrl.host.processes.lifeline import NoteKind
from invrl.host.ray.ray_setup import prepare_ray
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.initial_model import with_initial_models
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder


def checked_configuration(arguments: Sequence[str], *, command: str) -> Config:
    """Return the configuration of `invrl COMMAND` with these flags, after the checks of
    the command. Prints the warnings. Raises ConfigError."""
    sources = parse_flags(arguments, command=command)
    config = resolve(*sources, settings_for_command(command).source())
    if command == "eval":
        from invrl.rollout.tasks.tasks import held_out_only

        config = config.model_copy(update={"rollout": held_out_only(config.rollout)})
    if command == "train":
        config = with_initial_models(config)
    for warning in check_before_start(command, config, machine.inspect_machine()):
        print(f"invrl: warning: {warning}", file=sys.stderr)
    return config


def log_to_folder(
    folder: RunFolder, config: Config, *, process: str = "driver"
) -> None:
    """Send this process's log to the driver's log file in the run folder. `process`:
    its name there."""
    log_file = folder.log_path("driver")
    make_private(log_file)
    write_log_lines(process, config.run.log_settings(folder.path.name), file=log_file)


@contextmanager
def driver_context(folder: RunFolder) -> Iterator[Config]:
    """Yield the run's configuration, around the work of a driver, in a folder that its
    supervisor holds."""
    lifeline.hold()
    fork_parent.hold()
    config = load_resolved(folder.config_path)
    log_to_folder(folder, config)
    with failure_reported(folder):
        prepare_ray()
        yield config


@contextmanager
def failure_reported(folder: RunFolder) -> Iterator[None]:
    """Report a failure of the run's work in two lines on the terminal, and in full in
    the driver's log. Raises CommandFailed in its place; a ConfigError passes
    through."""
    interrupts.catch()
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, DamagedFileError | IdenticalFailuresError):
            # another incarnation would fail in the same way
            lifeline.tell(NoteKind.FINAL)
        lifeline.tell(NoteKind.REPORTED)
        logging.getLogger(__name__).exception("the run failed")
        reason, place = summarize_error(error).lines(folder.log_path("driver"))
        # The text may quote exceptions of user code.
        print(printable(f"invrl: the run failed: {reason}\n{place}"), file=sys.stderr)
        raise CommandFailed(FAILURE_EXIT) from error
