"""`invrl`: reads the name of the command and runs it. Errors that a user can correct
are printed here, as one block, with exit code 2.

Imports only what every command needs: `invrl --help` and `invrl --version` must be
fast.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from invrl import __version__
from invrl.cli.command import Command, CommandFailed
from invrl.errors import ConfigError, DamagedFileError
from invrl.host.network.direct_connections import THIS_MACHINE, bypass_proxies
from invrl.host.output.utf8_mode import use_utf8
from invrl.host.processes.environment_keys import hold_keys
from invrl.run.processes.driver_commands import (
    EVALUATION_COMMAND,
    FAILURE_EXIT,
    INCARNATION_COMMAND,
    INTERRUPT_EXIT,
    REPLAY_COMMAND,
    USAGE_EXIT,
)

COMMANDS = {
    "init": Command("init", "write a small project that trains as it is"),
    "train": Command(
        "train", "train a model with rollouts of your own program", takes_settings=True
    ),
    "resume": Command(
        "resume", "continue a run from its last checkpoint", file="train"
    ),
    "serve": Command(
        "serve",
        "serve a model through the gateway, without a trainer",
        takes_settings=True,
    ),
    "engine": Command(
        "engine",
        "start one engine alone, which runs use from elsewhere",
        takes_settings=True,
    ),
    "eval": Command(
        "evaluate", "measure a model on held-out tasks", takes_settings=True
    ),
    "export": Command(
        "export", "write the model of a run's step into a folder of its own"
    ),
    "export-data": Command(
        "export_rollouts",
        "write a run's best rollouts as a file to train on (sft, dpo)",
        file="export_data",
    ),
    "doctor": Command(
        "doctor",
        "check this machine and these settings, start nothing",
        takes_settings=True,
    ),
    "plan": Command(
        "plan",
        "estimate step time, staleness and the split of GPUs from a run or its rates",
    ),
    "show-config": Command(
        "show_config",
        "print the configuration that flags resolve to, as TOML",
        takes_settings=True,
    ),
    "install": Command(
        "install", "complete an installed wheel with torch, SGLang and Megatron"
    ),
    "prepare-model": Command(
        "prepare_model", "make a model folder that train and serve can read"
    ),
    "check-template": Command(
        "check_template",
        "test which conversations a model's chat template continues exactly",
    ),
    "view": Command(
        "view",
        "show runs, their rollouts and tokens in a browser, or write pages of them",
    ),
    "watch": Command(
        "watch", "show a run in the terminal while it goes on, or after it"
    ),
    "samples": Command(
        "samples", "show what the model said in a run: prompts, replies, rewards"
    ),
    "ledger": Command("ledger", "say what became of every rollout of a run"),
    "replay": Command(
        "replay", "repeat one training step of a run, with every token's numbers"
    ),
    "verify-weights": Command(
        "verify_weights", "compare what a running run's engines hold with what was sent"
    ),
    "report": Command(
        "report", "write the pages of `invrl view` into the run's folder", file="view"
    ),
    "environment": Command(
        "environment",
        "list, install, try and run environments with packages of their own",
    ),
}
INNER_COMMANDS = {
    INCARNATION_COMMAND: Command("run_incarnation_in_folder", file="train"),
    EVALUATION_COMMAND: Command("run_evaluation_in_folder", file="evaluate"),
    REPLAY_COMMAND: Command("replay_step_in_folder", file="replay"),
}
"""Commands that a supervisor starts as its driver; not for users."""
MOVED_COMMANDS = {
    "bench": "from a source checkout, run `python -m benchmarks.train` or `python -m benchmarks.weights` "
    "with the same flags",
    "soak": "from a source checkout, run `python tests/soak.py --minutes M [flags of invrl train]`",
}
"""Commands of earlier versions, and their replacements."""

_INTRO = """\
invrl: an RL post-training server. Point any program that speaks the OpenAI, Anthropic or Google API at its gateway:
the model is trained on what it samples for that program.

usage: invrl COMMAND [flags]"""
_OUTRO = """\
`invrl COMMAND --help` shows a command's flags. `invrl --version` prints the version.
Exit codes: 0 done, 2 bad input, 130 interrupted (Ctrl-C or TERM), 1 any other failure."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code of the process. `arguments`: those after
    the program's name; None: this process's."""
    if arguments is None:
        use_utf8()
        arguments = sys.argv[1:]
    hold_keys()
    bypass_proxies(*THIS_MACHINE)
    if os.environ.get("RAY_ADDRESS") == "local":  # the run's own Ray, as without it
        del os.environ["RAY_ADDRESS"]
    exit_code = run_with_exit_code(partial(_run, arguments))
    _notify_supervisor(exit_code)
    return exit_code


def run_with_exit_code(work: Callable[[], None]) -> int:
    """Do the work and return the exit code for how it ended. Prints the error that
    ended it, if any."""
    try:
        work()
        sys.stdout.flush()
    except ConfigError as error:
        _print_bad_input(error)
        return USAGE_EXIT
    except DamagedFileError as error:
        print(f"invrl: {error}", file=sys.stderr)
        return FAILURE_EXIT
    except CommandFailed as failure:
        return failure.exit_code
    except KeyboardInterrupt:
        print("invrl: interrupted", file=sys.stderr)
        return INTERRUPT_EXIT
    except BrokenPipeError:
        # `invrl ... | head`: nobody reads any more. Python flushes stdout again when it
        # exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE_EXIT
    return 0


def _run(arguments: Sequence[str]) -> None:
    if not arguments:
        _print_overview()
        raise CommandFailed(USAGE_EXIT)
    name = arguments[0]
    if name in ("-h", "--help", "help"):
        _print_overview()
    elif name in ("-V", "--version"):
        print(f"invrl {__version__}")
    else:
        _run_command(name, arguments[1:])


def _run_command(name: str, arguments: Sequence[str]) -> None:
    command = COMMANDS.get(name) or INNER_COMMANDS.get(name)
    if command is None:
        raise _no_such_command(name)
    if "-h" in arguments or "--help" in arguments:
        _print_help(name, command)
        return
    run = command.load()
    run(arguments)


def _no_such_command(name: str) -> ConfigError:
    if name in MOVED_COMMANDS:
        return ConfigError(
            "command line",
            name,
            "it is a program of the source checkout, not of the installed product",
            MOVED_COMMANDS[name],
        )
    from invrl.run.settings.config import nearest

    return ConfigError("command line", name, "no such command", nearest(name, COMMANDS))


def _print_overview() -> None:
    rows = [f"  {name:<15}{command.summary}" for name, command in COMMANDS.items()]
    print("\n".join([_INTRO, "", *rows, "", _OUTRO]))


def _print_help(name: str, command: Command) -> None:
    print(f"invrl {name}: {command.summary}\n\n{command.help()}")
    if command.takes_settings:
        from invrl.cli.flag_help import flag_help

        print(f"\n{flag_help(name)}")


def _print_bad_input(error: ConfigError) -> None:
    lines = [
        "invrl: bad input; nothing was started.",
        f"  where:  {error.field}",
        f"  value:  {error.value!r}",
        f"  reason: {error.reason}",
        f"  fix:    {error.fix}",
    ]
    print("\n".join(lines), file=sys.stderr)


def _notify_supervisor(exit_code: int) -> None:
    """Tell a driver's supervisor to expect no more heartbeats: the end of the
    interpreter may take long."""
    from invrl.host.processes import lifeline

    lifeline.tell(lifeline.NoteKind.ENDING, str(exit_code))


if __name__ == "__main__":
    sys.exit(main())
