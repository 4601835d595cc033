"""Reads a command's own arguments: flags that are not settings, and the run folder that
comes first."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from invrl.errors import ConfigError
from invrl.run.settings.name_suggestions import nearest
from invrl.store.run_folder import RunFolder
from invrl.user_code.near_path import path_fix


def split_flag(argument: str) -> tuple[str, str | None]:
    """Split a flag from the text after its `=`. The text is None if the argument has no
    `=`."""
    flag, equals, text = argument.partition("=")
    if not equals:
        return flag, None
    return flag, text


def take_value(flag: str, value: str | None, rest: list[str]) -> str:
    """Return the value of `flag`: the text after its `=`, or else the first of `rest`,
    which is removed there. Raises ConfigError if there is none."""
    if value is not None:
        return value
    if not rest or rest[0].startswith("--"):
        raise ConfigError(flag, "", "a value is missing", f"write {flag} VALUE")
    return rest.pop(0)


def split_options(
    arguments: Sequence[str], known: Sequence[str], switches: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return the values of the known flags, written `--name value` or `--name=value`,
    and all other arguments. A switch, which takes no value, has the value ""."""
    options: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, text = split_flag(argument)
        if flag in known:
            options[flag] = take_value(flag, text, rest)
        elif argument in switches:
            options[argument] = ""
        else:
            others.append(argument)
    return options, others


def read_arguments(
    arguments: Sequence[str], known: Sequence[str], switches: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return the flags as `split_options` does, and the arguments that are no flags.
    Raises ConfigError for an unknown flag."""
    options, others = split_options(arguments, known, switches)
    for argument in others:
        if argument.startswith("-"):
            raise unknown_flag(argument, [*known, *switches])
    return options, others


def read_options(
    arguments: Sequence[str], known: Sequence[str], switches: Sequence[str] = ()
) -> dict[str, str]:
    """Return the flags as `split_options` does. Raises ConfigError if there is anything
    else."""
    options, others = split_options(arguments, known, switches)
    if others:
        raise unknown_flag(others[0], [*known, *switches])
    return options


def read_number(
    flag: str,
    text: str,
    *,
    reason: str,
    fix: str,
    least: float = 0.0,
    most: float = math.inf,
) -> float:
    """Return the finite number that the text is. Raises ConfigError with this reason
    and fix."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if least <= number <= most and math.isfinite(number):
            return number
    raise ConfigError(flag, text, reason, fix)


def read_whole(
    flag: str, text: str, *, reason: str, fix: str, least: int = 0, most: int = 10**9
) -> int:
    """Return the whole number that the text is. Raises ConfigError with this reason and
    fix."""
    if text.isascii() and text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise ConfigError(flag, text, reason, fix)


def unknown_flag(argument: str, known: Sequence[str]) -> ConfigError:
    flag = argument.partition("=")[0]
    return ConfigError("command line", flag, "no such flag", nearest(flag, known))


def read_run_folder(arguments: Sequence[str]) -> RunFolder:
    """Return the run folder that the first argument names. Raises ConfigError if it is
    not one."""
    fix = "give the folder that `invrl train` printed"
    if not arguments:
        raise ConfigError("RUN", "", "it is missing", fix)
    if arguments[0].startswith("--"):
        reason = "a flag, where the run folder comes first"
        raise ConfigError("RUN", arguments[0], reason, f"write RUN before it: {fix}")
    folder = RunFolder(path=Path(arguments[0]).expanduser().absolute())
    if not folder.config_path.exists():
        reason = "not a run folder: it has no config.resolved.toml"
        raise ConfigError("RUN", str(folder.path), reason, path_fix(folder.path, fix))
    return folder
