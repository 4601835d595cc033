"""Checks of the source of the rollout function and the reward function, for faults that
make rollouts fail or slow, and raise nothing until they run."""

import inspect
from collections.abc import Callable
from typing import Any

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.run.settings.config import Config


def check_rollout_code(config: Config) -> str:
    """Check that the rollout function asks the model, and does not block the event loop
    that it shares. Raises `CheckWarning`."""
    from invrl.user_code import plugins
    from invrl.user_code.source import uses_argument

    path = config.rollout.rollout_function_path
    if not path:
        return "none"
    function = plugins.load_rollout_function(path)
    if not uses_argument(function, 1):
        reason = "it never uses its endpoint, so the model is not asked and there is no token to train"
        fix = (
            "ask with endpoint.openai(), or with endpoint.base_url and endpoint.api_key"
        )
        raise CheckWarning("rollout.rollout_function_path", path, reason, fix)
    _check_loop("rollout.rollout_function_path", path, function)
    return "in order"


def check_reward_code(config: Config) -> str:
    """Check that the reward function does not block the event loop. Raises
    `CheckWarning`."""
    from invrl.user_code import plugins

    path = config.rollout.reward_function_path
    if not path:
        return "none"
    _check_loop(
        "rollout.reward_function_path", path, plugins.load_reward_function(path)
    )
    return "in order"


def _check_loop(field: str, path: str, function: Callable[..., Any]) -> None:
    """Check an async function. A sync one runs in its own thread, where it may
    block."""
    from invrl.user_code.source import BLOCKING, OTHER_LOOPS, calls_in_async

    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        type(function).__call__
    ):
        return
    other_loop = calls_in_async(function, OTHER_LOOPS)
    if other_loop:
        reason = f"{other_loop} is called from an async function, whose event loop refuses a second one"
        fix = "await the coroutine instead, or write the function with def: it then has a thread of its own"
        raise CheckWarning(field, path, reason, fix)
    blocking = calls_in_async(function, BLOCKING)
    if blocking:
        reason = (
            f"{blocking} is synchronous and is called from an async function: while it waits, every other "
            "rollout of the worker waits too"
        )
        fix = "use an asynchronous client (endpoint.openai() is one), or write the function with def"
        raise CheckWarning(field, path, reason, fix)
