"""`invrl environment`: environments in processes and virtual environments of their
own."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from subprocess import Popen
from typing import Any

from invrl.cli.arguments import (
    read_arguments,
    read_number,
    read_whole,
    split_options,
    unknown_flag,
)
from invrl.cli.command import CommandFailed
from invrl.environments.arguments import read_environment_arguments
from invrl.environments.config import split_arguments
from invrl.environments.environment_folder import (
    EnvironmentFolder,
    catalog,
    find_environment,
)
from invrl.environments.episode_process import LeasingEnvironment, Order, play
from invrl.environments.installation import (
    check_installed,
    install,
    is_installed,
    virtual_environment,
)
from invrl.errors import ConfigError, ServerError
from invrl.host.output.printable import printable
from invrl.host.processes import interrupts
from invrl.host.processes.descendants import adopt_orphans, end_descendants
from invrl.host.processes.environment_keys import ENVIRONMENT_KEY, held_key
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.store.run_folder import RunFolder

_ACTIONS = ("list", "install", "try", "run")
_ARGS = "--environment.args"
_STEP_TIMEOUT = "--environment.step-timeout-s"
_STEP_TIMEOUT_S = "60"
_KILL_DEADLINE_S = 30.0
_URL_FLAGS = ("--base-url", "--model")


def environment(arguments: Sequence[str]) -> None:
    """usage: invrl environment list
           invrl environment install NAME
           invrl environment try NAME --model-path FOLDER [flags of invrl serve]
           invrl environment try NAME --base-url URL --model MODEL
           invrl environment run NAME --base-url URL [--concurrency N]
      NAME                            of the list, or ./FOLDER of your own
      --environment.args name=value   arguments of the environment, separated by commas
      --environment.step-timeout-s X  seconds between two calls of the model (default: 60)
      --episodes N                    episodes that `try` plays (default: 3)
      --base-url URL                  `try`: of an OpenAI-compatible server, with /v1; its key is
                                      $OPENAI_API_KEY. `run`: of a run's gateway; the key is
                                      $INVRL_ENV_KEY
      --concurrency N                 episodes at a time (default: 32)
    `install` makes a virtual environment below ~/.cache/invrl/environments (XDG_CACHE_HOME)
    with uv. `try` plays episodes without training and prints conversation, reward and
    components. `run` leases tasks of a run with --external-environments until it ends, on any
    machine; `invrl train --environment NAME` starts it by itself."""
    if not arguments or arguments[0] not in _ACTIONS:
        action = arguments[0] if arguments else ""
        reason = "it begins with what to do"
        fix = f"write one of: {', '.join(_ACTIONS)}"
        raise ConfigError("environment", action, reason, fix)
    action, *rest = arguments
    if action == "list":
        read_arguments(rest, ())
        _list()
        return
    if not rest or rest[0].startswith("-"):
        fix = f"write invrl environment {action} NAME"
        raise ConfigError("NAME", "", "the environment's name is missing", fix)
    name, *flags = rest
    folder = find_environment("NAME", name)
    if action == "install":
        read_arguments(flags, ())
        install(folder)
        print(f"installed {folder.called} in {virtual_environment(folder)}")
        return
    check_installed("NAME", folder)
    if action == "try":
        _try(folder, flags)
    else:
        _run(folder, flags)


def _list() -> None:
    for folder in catalog():
        state = "installed" if is_installed(folder) else "not installed"
        print(f"{folder.name:<16}{state:<15}Python {folder.python:<6}{folder.summary}")


def _order(folder: EnvironmentFolder, options: Mapping[str, str]) -> Order:
    texts = split_arguments(options.get(_ARGS, ""))
    return Order(
        arguments=read_environment_arguments(_ARGS, folder, texts),
        step_timeout_s=read_number(
            _STEP_TIMEOUT,
            options.get(_STEP_TIMEOUT, _STEP_TIMEOUT_S),
            reason="it is not a number of seconds above 0",
            fix="leave it out for 60",
            least=1e-3,
        ),
    )


def _run(folder: EnvironmentFolder, flags: Sequence[str]) -> None:
    known = ("--base-url", "--concurrency", _ARGS, _STEP_TIMEOUT)
    options, others = read_arguments(flags, known)
    url = options.get("--base-url", "")
    if not url.startswith(("http://", "https://")) or others:
        fix = "write --base-url http://HOST:PORT, of the run's gateway"
        raise ConfigError("--base-url", url, "it is not the URL of a gateway", fix)
    key = held_key(ENVIRONMENT_KEY)
    if not key:
        fix = f"export {ENVIRONMENT_KEY}, as the run has it"
        raise ConfigError(ENVIRONMENT_KEY, "", "the run's key is missing", fix)
    concurrency = read_whole(
        "--concurrency",
        options.get("--concurrency", "32"),
        reason="it is not a number of episodes",
        fix="leave it out for 32",
        least=1,
    )
    order = replace(
        _order(folder, options),
        url=url.rstrip("/"),
        key=key,
        concurrency=concurrency,
    )
    interrupts.catch()
    adopt_orphans()  # tools of the environment may be in sessions of their own
    end_left_behind = partial(
        end_descendants, terminate=False, grace_s=0.0, kill_within_s=_KILL_DEADLINE_S
    )
    try:
        LeasingEnvironment(folder, order, end_left_behind=end_left_behind).run()
    except ServerError as error:
        print(f"invrl: {error}", file=sys.stderr)
        raise CommandFailed(FAILURE_EXIT) from error


def _try(folder: EnvironmentFolder, flags: Sequence[str]) -> None:
    known = (*_URL_FLAGS, "--episodes", _ARGS, _STEP_TIMEOUT)
    options, served = split_options(flags, known)
    count = read_whole(
        "--episodes",
        options.get("--episodes", "3"),
        reason="it is not a number of episodes",
        fix="leave it out for 3",
        least=1,
    )
    order = _order(folder, options)
    if "--base-url" not in options:
        _try_on_folder(folder, order, count, served)
        return
    if served:
        raise unknown_flag(served[0], known)
    model = options.get("--model")
    if model is None:
        fix = "write --model NAME, as the server calls it"
        raise ConfigError("--model", "", "the model's name is missing", fix)
    endpoint = {
        "base_url": options["--base-url"].rstrip("/"),
        "key": os.environ.get("OPENAI_API_KEY", "none"),
        "model": model,
    }
    _play_and_print(folder, order, [endpoint] * count)


def _try_on_folder(
    folder: EnvironmentFolder, order: Order, count: int, flags: Sequence[str]
) -> None:
    """Serve a model folder as `invrl serve` does, and try the environment on it."""
    from invrl.cli.commands.serve import open_sessions, serving_model
    from invrl.cli.run_process import (
        checked_configuration,
        failure_reported,
        log_to_folder,
    )
    from invrl.rollout.dispatch.dispatcher import first_to_fail
    from invrl.run.settings.folder import hold_run_folder

    config = checked_configuration(flags, command="serve")

    async def serve_and_play(run: RunFolder) -> None:
        async with serving_model(config, run) as serving:
            sessions = await open_sessions(serving, count)
            endpoints = [
                {
                    "base_url": session.base_url,
                    "key": session.key,
                    "model": serving.settings.model_name,
                }
                for session in sessions
            ]
            programs: list[Popen[bytes]] = []
            playing = asyncio.to_thread(
                _play_and_print, folder, order, endpoints, programs.append
            )
            try:
                await first_to_fail(playing, serving.watch())
            finally:
                for program in programs:  # its thread waits for it
                    program.terminate()

    with hold_run_folder(config, "serve") as run:
        log_to_folder(run, config)
        with failure_reported(run):
            interrupts.run(serve_and_play(run))


def _play_and_print(
    folder: EnvironmentFolder,
    order: Order,
    endpoints: Sequence[Mapping[str, str]],
    on_start: Callable[[Popen[bytes]], object] = lambda process: None,
) -> None:
    """Play one episode at each endpoint and print them. Raises CommandFailed unless all
    have a reward."""
    tasks = [{**endpoint, "task": {"seed": i}} for i, endpoint in enumerate(endpoints)]
    rewarded: list[bool] = []

    def show(report: Mapping[str, Any]) -> None:
        print(printable(episode_text(len(rewarded), report)), flush=True)
        rewarded.append("reward" in report)

    code = play(
        folder,
        "try",
        replace(order, endpoints=tasks),
        on_report=show,
        show=lambda line: print(printable(line), end="", flush=True),
        on_start=on_start,
    )
    if code != 0 or len(rewarded) != len(endpoints) or not all(rewarded):
        text = f"{sum(rewarded)} of {len(endpoints)} episodes have a reward"
        print(f"invrl: {text}; exit code of the program: {code}", file=sys.stderr)
        raise CommandFailed(FAILURE_EXIT)


def episode_text(number: int, report: Mapping[str, Any]) -> str:
    """Return the conversation of an episode and what it was worth."""
    lines = [f"--- episode {number}"]
    for message in report["messages"] or ():
        if not isinstance(message, dict):  # of a package with a form of its own
            lines.append(str(message))
            continue
        lines.append(f"{message.get('role')}: {message.get('content') or ''}")
        calls = message.get("tool_calls") or ()
        lines += [f"  calls {_called(call)}" for call in calls]
    if "failure" in report:
        lines.append(f"FAILED: {report['failure']}")
        return "\n".join(lines)
    lines.append(f"reward: {report['reward']:g}")
    lines += [f"  {name}: {value:g}" for name, value in report["components"].items()]
    return "\n".join(lines)


def _called(call: Any) -> Any:
    """Return the function of a tool call in OpenAI's form; of another form, all."""
    return call.get("function", call) if isinstance(call, dict) else call
