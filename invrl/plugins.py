"""User code by import path: `package.module:name` becomes a callable of the right shape, or a PluginError
that says what is wrong and what to write instead.

Invariant: what a loader returns has been imported, is callable, and accepts the call that its Protocol in
`interfaces.py` makes. Called at start-up, before any process exists, and again in the process that runs
the code. The current working directory is importable, so a file beside the user's shell will do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

from invrl.errors import PluginError
from invrl.interfaces import (
    AdvantageFn,
    GroupFilter,
    GroupRolloutFn,
    PolicyLoss,
    RewardFn,
    RolloutFn,
    TaskSource,
)

Plugin = TypeVar("Plugin")


def load_rollout_function(path: str, field: str = "rollout_function_path") -> RolloutFn | GroupRolloutFn:
    """A group form is one with `group = True` set on it. Raises PluginError, as all loaders do."""
    function = load_plugin(path, field, RolloutFn)
    return load_plugin(path, field, GroupRolloutFn) if is_group_form(function) else function


def is_group_form(function: RolloutFn | GroupRolloutFn) -> bool:
    """Whether the rollout function takes all endpoints of a group at once."""
    return bool(getattr(function, "group", False))


def load_reward_function(path: str, field: str = "reward_function_path") -> RewardFn:
    return load_plugin(path, field, RewardFn)


def load_task_source(path: str, field: str = "task_source_path") -> TaskSource:
    return load_plugin(path, field, TaskSource)


def load_group_filter(
    name: str, built_ins: Mapping[str, GroupFilter], field: str = "group_filter"
) -> GroupFilter:
    return built_ins.get(name) or load_plugin(name, field, GroupFilter, built_ins)


def load_advantage(name: str, built_ins: Mapping[str, AdvantageFn], field: str = "advantage") -> AdvantageFn:
    return built_ins.get(name) or load_plugin(name, field, AdvantageFn, built_ins)


def load_policy_loss(
    name: str, built_ins: Mapping[str, PolicyLoss], field: str = "policy_loss"
) -> PolicyLoss:
    return built_ins.get(name) or load_plugin(name, field, PolicyLoss, built_ins)


def load_plugin(path: str, field: str, protocol: type[Plugin], built_ins: Iterable[str] = ()) -> Plugin:
    """The callable at `module:name` (dots after the colon reach into objects), checked against the
    parameters of `protocol.__call__`. `field` is the setting that errors name; `built_ins` are names
    that would have been valid too. Raises PluginError."""
    module_name, colon, attribute = path.partition(":")
    if not (colon and all(part.isidentifier() for part in f"{module_name}.{attribute}".split("."))):
        names = list(built_ins)
        raise PluginError(
            field=field,
            value=path,
            reason="neither a built-in name nor module:name" if names else "not of the form module:name",
            fix=_suggest(path, names, "module:name" if not names else f"{', '.join(names)}, or module:name"),
        )
    target: object = _import(path, module_name, field)
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in dir(target) if not name.startswith("_")]
            raise PluginError(
                field=field,
                value=path,
                reason=f"{module_name} has no {attribute!r}",
                fix=_suggest(part, public, f"define {attribute!r} in {module_name}"),
            )
        target = getattr(target, part)
    _check_call(target, path, field, protocol)
    return cast(Plugin, target)


def _import(path: str, module_name: str, field: str) -> object:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise PluginError(
                field=field,
                value=path,
                reason=f"there is no module {missing!r} (looked in {here} and the Python path)",
                fix=_suggest(missing, _siblings(missing), "give the module as Python imports it"),
            ) from None
        raise _broken(error, path, module_name, field) from error
    except (Exception, SystemExit) as error:
        raise _broken(error, path, module_name, field) from error


def _broken(error: BaseException, path: str, module_name: str, field: str) -> PluginError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return PluginError(
        field=field,
        value=path,
        reason=f"importing {module_name} raised {type(error).__name__}: {error} "
        f"({frame.filename}:{frame.lineno})",
        fix=f'make `python -c "import {module_name}"` work',
    )


def _siblings(missing: str) -> list[str]:
    """Modules that can be imported from where `missing` was looked for, by their full names."""
    parent, _, _ = missing.rpartition(".")
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(parent)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(places)]


def _check_call(target: object, path: str, field: str, protocol: type) -> None:
    if inspect.isclass(target) or not callable(target):
        raise PluginError(
            field=field,
            value=path,
            reason="a class, not a function" if inspect.isclass(target) else f"{target!r} is not callable",
            fix="give a function, or an object with a __call__ method",
        )
    wanted = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    by_name = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
    try:
        signature = inspect.signature(target)
    except ValueError:  # a C function without a signature: its first call will tell
        return
    try:
        signature.bind(*([None] * (len(wanted) - len(by_name))), **by_name)
    except TypeError as error:
        raise PluginError(
            field=field,
            value=path,
            reason=f"its signature {signature} does not take the call it will get ({error})",
            fix=f"write it as {_attribute_name(path)}({', '.join(_shown(wanted))})",
        ) from None


def _attribute_name(path: str) -> str:
    """`rollout` of `package.module:rollout`."""
    return path.partition(":")[2].rpartition(".")[2]


def _shown(parameters: list[inspect.Parameter]) -> list[str]:
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


def _suggest(wrong: str, valid: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(wrong, list(valid), n=1)
    return f"did you mean {near[0]!r}? Otherwise {otherwise}" if near else otherwise
