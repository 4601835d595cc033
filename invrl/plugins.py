"""User code by import path: `package.module:name` becomes a callable of the right shape, or a PluginError
that says what is wrong and what to write instead.
Invariant: what a loader returns has been imported, is callable, and accepts the call that its Protocol in
`interfaces.py` makes. Called at start-up, before any process exists, and again in the process that runs
the code. The current working directory is importable, so a file beside the user's shell will do."""

import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar, cast

from invrl.errors import PluginError
from invrl.interfaces import GroupRolloutFn, RewardFn, RolloutFn

Plugin = TypeVar("Plugin")
Refused = Callable[[str, str], PluginError]
"""Reason and fix to the error that names the setting."""


def load_rollout_function(path: str) -> RolloutFn | GroupRolloutFn:
    """A group form is one with `group = True` set on it. Raises PluginError, as all loaders do."""
    function = load_plugin(path, "rollout_function_path", RolloutFn)
    return load_plugin(path, "rollout_function_path", GroupRolloutFn) if is_group_form(function) else function


def is_group_form(function: RolloutFn | GroupRolloutFn) -> bool:
    """Whether the rollout function takes all endpoints of a group at once."""
    return bool(getattr(function, "group", False))


def load_reward_function(path: str) -> RewardFn:
    return load_plugin(path, "reward_function_path", RewardFn)


def load_plugin(
    path: str, field: str, protocol: type[Plugin], built_ins: Mapping[str, Plugin] | None = None
) -> Plugin:
    """The built-in of that name, or the callable at `module:name` (dots after the colon reach into objects),
    checked against the parameters of `protocol.__call__`. `field`: the setting. Raises PluginError."""
    if path in (names := dict(built_ins or {})):
        return names[path]
    refused = partial(PluginError, field, path)
    module_name, colon, attribute = path.partition(":")
    if not (colon and all(part.isidentifier() for part in f"{module_name}.{attribute}".split("."))):
        reason = "neither a built-in name nor module:name" if names else "not of the form module:name"
        valid = f"{', '.join(names)}, or module:name" if names else "module:name"
        raise refused(reason, _suggest(path, names, valid))
    target = _import(module_name, refused)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in dir(target) if not name.startswith("_")]
            fix = _suggest(part, public, f"define {attribute!r} in {module_name}")
            raise refused(f"{module_name} has no {attribute!r}", fix)
        target = getattr(target, part)
    _check_call(target, attribute, protocol, refused)
    return cast(Plugin, target)


def _import(module_name: str, refused: Refused) -> object:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            reason = f"there is no module {missing!r} (looked in {here} and the Python path)"
            fix = _suggest(missing, _siblings(missing), "give the module as Python imports it")
            raise refused(reason, fix) from None
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what, place = f"{type(error).__name__}: {error}", f"{frame.filename}:{frame.lineno}"
        fix = f'make `python -c "import {module_name}"` work'
        raise refused(f"importing {module_name} raised {what} ({place})", fix) from error


def _siblings(missing: str) -> list[str]:
    """Modules that can be imported from where `missing` was looked for, by their full names."""
    if not (parent := missing.rpartition(".")[0]):
        return [module.name for module in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(parent)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(places)]


def _check_call(target: object, attribute: str, protocol: type, refused: Refused) -> None:
    if inspect.isclass(target) or not callable(target):
        reason = "a class, not a function" if inspect.isclass(target) else f"{target!r} is not callable"
        raise refused(reason, "give a function, or an object with a __call__ method")
    wanted = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    by_name = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
    try:
        signature = inspect.signature(target)
    except ValueError:  # a C function without a signature: its first call will tell
        return
    try:
        signature.bind(*([None] * (len(wanted) - len(by_name))), **by_name)
    except TypeError as error:
        plain = inspect.Signature([p.replace(annotation=p.empty, default=p.empty) for p in wanted])
        reason = f"its signature {signature} does not take the call it will get ({error})"
        raise refused(reason, f"write it as {attribute.rpartition('.')[2]}{plain}") from None


def _suggest(wrong: str, valid: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(wrong, list(valid), n=1)
    return f"did you mean {near[0]!r}? Otherwise {otherwise}" if near else otherwise
