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
from pathlib import Path
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
    checked against the parameters of `protocol.__call__`. A file below the working directory may stand for
    its module: `my_agent.py:name`. `field`: the setting. Raises PluginError."""
    if path in (names := dict(built_ins or {})):
        return names[path]
    refused = partial(PluginError, field, path)
    module_name, colon, attribute = path.partition(":")
    file = module_name if colon and _is_file_path(module_name) else ""
    if file:
        module_name = _module_of_file(file, attribute, refused)
    if not (colon and all(part.isidentifier() for part in f"{module_name}.{attribute}".split("."))):
        reason = "neither a built-in name nor module:name" if names else "not of the form module:name"
        form = _form_of(path)
        valid = f"{', '.join(names)}, or {form}" if names else form
        raise refused(reason, _suggest(path, names, valid))
    target = _import(module_name, refused)
    if file and not Path(file).expanduser().samefile(getattr(target, "__file__", None) or os.devnull):
        reason = f"Python finds another {module_name} first, in {getattr(target, '__file__', 'itself')}"
        raise refused(reason, "rename the file")
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in dir(target) if not name.startswith("_")]
            fix = _suggest(part, public, f"define {attribute!r} in {module_name}")
            raise refused(f"{module_name} has no {attribute!r}", fix)
        target = getattr(target, part)
    _check_call(target, attribute, protocol, refused)
    return cast(Plugin, target)


def _is_file_path(text: str) -> bool:
    return text.endswith(".py") or "/" in text


def _module_of_file(file: str, attribute: str, refused: Refused) -> str:
    """The module's name by which Python imports the file from the working directory. PluginError where there
    is no such file, or where it has no such name."""
    here = Path.cwd()
    path = (here / Path(file).expanduser()).resolve()
    if not path.is_file():
        siblings = [str(Path(file).parent / near.name) for near in path.parent.glob("*.py")]
        fix = _suggest(file, siblings, "give the file, or the module as Python imports it")
        raise refused(f"there is no file {str(path)!r}", fix)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise refused(f"{path.name!r} is no name of a Python module", "rename it, to my_agent.py for example")
    inside = path.is_relative_to(here.resolve())
    parts = path.relative_to(here.resolve()).with_suffix("").parts if inside else ()
    if parts and all(part.isidentifier() for part in parts):
        return ".".join(parts)
    reason = f"modules are imported from {here} and the Python path, and the file is below {path.parent}"
    fix = f"start from {path.parent}, or add it to PYTHONPATH, and write {path.stem}:{attribute}"
    raise refused(reason, fix)


def _form_of(path: str) -> str:
    """How an import path without a colon would be written: its last part may be the function's name."""
    module_name, dot, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    plausible = all(part.isidentifier() for part in f"{module_name}.{name}".split("."))
    if path.endswith(".py") or not dot or not plausible:
        file = path.removesuffix(".py")
        return f"{file}:NAME, with the name of a function in it" if file.isidentifier() else "module:name"
    return f"{module_name}:{name}"


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
