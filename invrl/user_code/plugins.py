"""User code by import path: turns `package.module:name` into a callable, or raises a
PluginError.

The error describes the fault and the fix.

Invariant: a loader's result has been imported, is callable, and accepts the call that
its Protocol in `interfaces.py` describes. Loaders run at start-up, before any process
exists, and again in the process that runs the code. The current working directory is
importable, so a file in the user's own folder works.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError

from invrl.errors import PluginError
from invrl.interfaces import (
    GroupFilter,
    GroupRolloutFn,
    HistoryGroupFilter,
    RewardFn,
    RolloutFn,
)
from invrl.types.section import Section

Plugin = TypeVar("Plugin")
MakeError = Callable[[str, str], PluginError]
"""Makes the error that names the setting, from a reason and a fix."""


def load_rollout_function(path: str) -> RolloutFn | GroupRolloutFn:
    """Load a rollout function. One with `group = True` set on it is checked as the
    group form. Raises PluginError."""
    function = load_plugin(path, "rollout_function_path", RolloutFn)
    if is_group_form(function):
        return load_plugin(path, "rollout_function_path", GroupRolloutFn)
    return function


def is_group_form(function: RolloutFn | GroupRolloutFn) -> bool:
    """Whether the rollout function takes all endpoints of a group together."""
    return bool(getattr(function, "group", False))


def load_reward_function(path: str) -> RewardFn:
    """Load a reward function. Raises PluginError."""
    return load_plugin(path, "reward_function_path", RewardFn)


def takes_keyword(
    function: Callable[..., object], name: str, *, after: int = 0
) -> bool:
    """Whether the function has a parameter of this name that can be given by keyword,
    behind its first `after` ones. `**kwargs` does not count."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a C function without a signature
        return False
    return any(
        parameter.name == name
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters[after:]
    )


def load_group_filter(
    path: str, built_ins: Mapping[str, GroupFilter | HistoryGroupFilter]
) -> GroupFilter | HistoryGroupFilter:
    """Load a group filter. A function with a parameter `history` is checked as the form
    that takes it. Raises PluginError."""
    if path in built_ins:
        return built_ins[path]
    make_error = partial(PluginError, "group_filter", path)
    target, attribute = _find(path, list(built_ins), make_error)
    if takes_history(target):
        _check_call(target, attribute, HistoryGroupFilter, make_error)
    else:
        _check_call(
            target, attribute, GroupFilter, make_error, or_as=HistoryGroupFilter
        )
    return cast(GroupFilter, target)


def takes_history(group_filter: object) -> bool:
    """Whether the group filter has a parameter `history` besides its first one."""
    if not callable(group_filter) or inspect.isclass(group_filter):
        return False
    return takes_keyword(group_filter, "history", after=1)


def load_plugin(
    path: str,
    field: str,
    protocol: type[Plugin],
    built_ins: Mapping[str, Plugin] | None = None,
    *,
    names: Sequence[str] = (),
    tables: Mapping[str, Mapping[str, object]] | None = None,
    or_as: type | None = None,
) -> Plugin:
    """Return the built-in of that name, or the callable at `module:name`; dots after
    the colon reach into objects.

    The callable is checked against the parameters of `protocol.__call__`, or of
    `or_as`, another form of it. A `Section` with a `__call__` is made from its table in
    `tables`, which are by the name after the colon. A file below the working directory
    may be given instead of its module: `my_agent.py:name`. `field` is the setting that
    errors name; `names` are built-ins that errors name too. Raises PluginError.
    """
    built_ins = built_ins or {}
    if path in built_ins:
        return built_ins[path]
    make_error = partial(PluginError, field, path)
    target, attribute = _find(path, [*built_ins, *names], make_error)
    table = (tables or {}).get(plugin_name(path), {})
    if inspect.isclass(target) and issubclass(target, Section):
        target = _configured(target, table, plugin_name(path), make_error)
    elif table:
        reason = (
            f"it has no settings, and there is a table [plugin.{plugin_name(path)}]"
        )
        fix = "leave the table out, or write it as a Section with a __call__ method"
        raise make_error(reason, fix)
    if or_as is None or not accepts_call(target, or_as):
        _check_call(target, attribute, protocol, make_error, or_as=or_as)
    return cast(Plugin, target)


def plugin_name(path: str) -> str:
    """Return the name of user code at `module:name`, which its table has too."""
    return path.partition(":")[2].rpartition(".")[2]


def _configured(
    plugin: type[Section],
    table: Mapping[str, object],
    name: str,
    make_error: MakeError,
) -> Section:
    """Make user code that has settings. Raises PluginError for settings that it
    refuses."""
    try:
        return plugin.model_validate(dict(table))
    except ValidationError as error:
        finding = error.errors()[0]
        key = ".".join(str(part) for part in finding["loc"])
        reason = f"{key} in [plugin.{name}] is {finding['input']!r}: {finding['msg']}"
        if finding["type"] == "extra_forbidden":
            reason = f"[plugin.{name}] has no setting {key!r}"
            fix = _suggest(
                key,
                plugin.model_fields,
                f"give one of {', '.join(plugin.model_fields)}",
            )
            raise make_error(reason, fix) from None
        description = (
            plugin.model_fields[key].description if key in plugin.model_fields else ""
        )
        raise make_error(reason, f"set {key}: {description}") from None


def _find(
    path: str, built_in_names: list[str], make_error: MakeError
) -> tuple[object, str]:
    """Return the object at `module:name`, and its name. Raises PluginError."""
    module_name, colon, attribute = path.partition(":")
    file = ""
    if colon and _is_file_path(module_name):
        file = module_name
        module_name = _file_module(file, attribute, make_error)
    if not colon or not _all_identifiers(f"{module_name}.{attribute}"):
        raise _malformed(path, built_in_names, make_error)
    module = _import(module_name, attribute, make_error)
    if file:
        _check_same_file(module, module_name, file, make_error)
    return _reach(module, module_name, attribute, make_error), attribute


def _is_file_path(text: str) -> bool:
    return text.endswith(".py") or "/" in text


def _all_identifiers(dotted: str) -> bool:
    return all(part.isidentifier() for part in dotted.split("."))


def _malformed(path: str, built_ins: list[str], make_error: MakeError) -> PluginError:
    """Return the error for a path that is neither a built-in nor of the form
    module:name."""
    form = _suggested_form(path)
    if not built_ins:
        return make_error(
            "not of the form module:name", _suggest(path, built_ins, form)
        )
    fix = _suggest(path, built_ins, f"{', '.join(built_ins)}, or {form}")
    return make_error("neither a built-in name nor module:name", fix)


def _suggested_form(path: str) -> str:
    """Suggest how to write an import path without a colon: its last part may be the
    function's name."""
    without_suffix = path.removesuffix(".py")
    module_name, dot, name = without_suffix.replace("/", ".").rpartition(".")
    if dot and not path.endswith(".py") and _all_identifiers(f"{module_name}.{name}"):
        return f"{module_name}:{name}"
    if without_suffix.isidentifier():
        return f"{without_suffix}:NAME, with the name of a function in it"
    return "module:name"


def _file_module(file: str, attribute: str, make_error: MakeError) -> str:
    """Return the module name under which Python imports the file from the working
    directory.

    Raises PluginError if there is no such file, or if no module name leads to it.
    """
    working_folder = Path.cwd()
    path = (working_folder / Path(file).expanduser()).resolve()
    if not path.is_file():
        siblings = [
            str(Path(file).parent / sibling.name)
            for sibling in path.parent.glob("*.py")
        ]
        fix = _suggest(
            file, siblings, "give the file, or the module as Python imports it"
        )
        raise make_error(f"there is no file {str(path)!r}", fix)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise make_error(
            f"{path.name!r} is no name of a Python module",
            "rename it, to my_agent.py for example",
        )
    if path.is_relative_to(working_folder.resolve()):
        parts = path.relative_to(working_folder.resolve()).with_suffix("").parts
        module_name = ".".join(parts)
        if _all_identifiers(module_name):
            return module_name
    reason = f"modules are imported from {working_folder} and the Python path; the file is below {path.parent}"
    fix = f"start from {path.parent}, or add it to PYTHONPATH, and write {path.stem}:{attribute}"
    raise make_error(reason, fix)


def _import(module_name: str, attribute: str, make_error: MakeError) -> object:
    """Import the module. `attribute`: the wanted part of it, for the fix. Raises
    PluginError."""
    working_folder = os.getcwd()
    if working_folder not in sys.path:
        sys.path.insert(0, working_folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            reason = f"there is no module {missing!r} (looked in {working_folder} and the Python path)"
            paths = [
                f"{module_name.replace(missing, sibling, 1)}:{attribute}"
                for sibling in _siblings(missing)
            ]
            fix = _suggest(
                f"{module_name}:{attribute}",
                paths,
                "give the module as Python imports it",
            )
            raise make_error(reason, fix) from None
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        fix = f'make `python -c "import {module_name}"` work'
        raise make_error(f"importing {module_name} raised {raised}", fix) from error


def _siblings(missing: str) -> list[str]:
    """Return the full names of the importable modules in the package in which `missing`
    was looked up."""
    parent = missing.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(parent)
    if spec is None:
        return []
    folders = list(spec.submodule_search_locations or ())
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders)]


def _check_same_file(
    module: object, module_name: str, file: str, make_error: MakeError
) -> None:
    """Raise PluginError if Python finds a module of this name elsewhere than in the
    user's file."""
    imported_file = getattr(module, "__file__", None)
    if Path(file).expanduser().samefile(imported_file or os.devnull):
        return
    place = getattr(module, "__file__", "itself")
    raise make_error(
        f"Python finds another {module_name} first, in {place}", "rename the file"
    )


def _reach(
    module: object, module_name: str, attribute: str, make_error: MakeError
) -> object:
    """Return the object at `attribute` of the module; dots reach into objects."""
    target = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in dir(target) if not name.startswith("_")]
            fix = _suggest(part, public, f"define {attribute!r} in {module_name}")
            raise make_error(f"{module_name} has no {attribute!r}", fix)
        target = getattr(target, part)
    return target


def _check_call(
    target: object,
    attribute: str,
    protocol: type,
    make_error: MakeError,
    *,
    or_as: type | None = None,
) -> None:
    """Raise PluginError unless `target` accepts the call that the protocol describes.
    `or_as`: another form that the fix names too."""
    fix = "give a function, or an object with a __call__ method"
    if inspect.isclass(target):
        raise make_error("a class, not a function", fix)
    if not callable(target):
        raise make_error(f"{target!r} is not callable", fix)
    try:
        _bind(target, protocol)
    except TypeError as error:
        signature = inspect.signature(target)
        parameters = _call_parameters(protocol)
        reason = (
            f"its signature {signature} does not take the call it will get ({error})"
        )
        function_name = attribute.rpartition(".")[2]
        fix = f"write it as {function_name}{inspect.Signature(parameters)}"
        if or_as is not None:
            fix += f" or {function_name}{inspect.Signature(_call_parameters(or_as))}"
        raise make_error(reason, fix) from None


def accepts_call(target: object, protocol: type) -> bool:
    """Whether `target` accepts the call that the protocol describes."""
    if inspect.isclass(target) or not callable(target):
        return False
    try:
        _bind(target, protocol)
    except TypeError:
        return False
    return True


def _bind(target: Callable[..., object], protocol: type) -> None:
    """Bind the arguments that the protocol describes to those of `target`. Raises
    TypeError if they do not fit."""
    parameters = _call_parameters(protocol)
    by_name = {
        parameter.name: None
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    by_position = [None] * (len(parameters) - len(by_name))
    try:
        signature = inspect.signature(target)
    except ValueError:
        # a C function without a signature can only be checked by calling it
        return
    signature.bind(*by_position, **by_name)


def _call_parameters(protocol: type) -> list[inspect.Parameter]:
    """Return the parameters of the call that the protocol describes, without their
    types."""
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    return [
        parameter.replace(annotation=parameter.empty, default=parameter.empty)
        for parameter in parameters
    ]


def _suggest(wrong: str, valid: Iterable[str], otherwise: str) -> str:
    """Return a fix that names the valid name nearest to the wrong one, if one is
    near."""
    nearest = difflib.get_close_matches(wrong, list(valid), n=1)
    if not nearest:
        return otherwise
    return f"did you mean {nearest[0]!r}? Otherwise {otherwise}"
