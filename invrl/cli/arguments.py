"""Reads a command's own arguments: flags that are not settings, and the run folder that
comes first."""

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
    arguments: Sequence[str], known: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the values of the known flags, written `--name value` or `--name=value`,
    and all other arguments."""
    options: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, text = split_flag(argument)
        if flag in known:
            options[flag] = take_value(flag, text, rest)
        else:
            others.append(argument)
    return options, others


def read_options(arguments: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of the known flags. Raises ConfigError if there is anything
    else."""
    options, others = split_options(arguments, known)
    if others:
        raise unknown_flag(others[0], known)
    return options


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
