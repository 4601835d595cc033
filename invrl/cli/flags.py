"""The command line as a source of configuration: one kebab-case flag per field, and their help.
Leaf names are unique across sections, so a flag needs no prefix. Booleans are `--x` / `--no-x`. Options
of other packages pass through as `--sglang-*`, `--router-*`, `--megatron-*`."""

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from invrl.cli.command_settings import settings_of
from invrl.cli.presets import configuration_file, preset_names
from invrl.errors import ConfigError
from invrl.run.config import SECTIONS, UPSTREAM, Scalar, Source, read_toml
from invrl.run.name_suggestions import nearest_setting

CONFIG_FLAG = "--config"
_CONFIG_HELP = (
    "TOML file; its tables are the sections below, flags win over it. Or a preset by its name: "
    + ", ".join(preset_names())
)
_PACKAGE_HELP = {
    "sglang": "SGLang's ServerArgs, for example --sglang-chunked-prefill-size 512",
    "router": "sglang-router's arguments, for example --router-policy manual",
    "megatron": "fields of its Transformer-, DistributedDataParallel- and OptimizerConfig",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    table: str
    key: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def takes_several(self) -> bool:
        """Values after it, up to the next flag, are its own too."""
        return get_origin(self.info.annotation) is tuple

    @property
    def is_switch(self) -> bool:
        return self.info.annotation is bool


LEAVES = [Leaf(table=t, key=k, info=i) for t, s in SECTIONS.items() for k, i in s.model_fields.items()]
_LEAF_OF = {leaf.flag: leaf for leaf in LEAVES}
_LEAF_OF |= {"--no-" + leaf.flag[2:]: leaf for leaf in LEAVES if leaf.is_switch}


def parse_flags(
    arguments: Sequence[str], mistakes: list[ConfigError] | None = None, *, command: str = "train"
) -> tuple[Source, ...]:
    """The sources that the command line of `command` names: its TOML file, if any, then its flags. The file
    may set anything. Raises ConfigError for an unknown flag (with the nearest valid one), for one that means
    nothing to this command, for a missing or a stray value; given `mistakes`, all of them go there, and what
    is wrong is left out."""
    tables: dict[str, dict[str, Scalar]] = {}
    files: list[Source] = []
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        given = value if equals else None
        try:
            if leaf := _LEAF_OF.get(flag):
                if leaf.is_switch and given is not None:
                    raise ConfigError(flag, given, "a switch takes no value", "write --name or --no-name")
                read = flag == leaf.flag if leaf.is_switch else take_value(flag, given, rest)
                while leaf.takes_several and rest and not rest[0].startswith("--"):
                    read = f"{read},{rest.pop(0)}"
                if not settings_of(command).uses(leaf.table, leaf.key):
                    raise _of_no_use(flag, command)
                tables.setdefault(leaf.table, {})[leaf.key] = read
            elif flag == CONFIG_FLAG:
                files.append(read_toml(configuration_file(take_value(flag, given, rest))))
            elif package := next((name for name in UPSTREAM if flag.startswith(f"--{name}-")), ""):
                key = flag.removeprefix(f"--{package}-").replace("-", "_")
                read = _upstream_value(given, rest)
                if package not in settings_of(command).packages:
                    raise _of_no_use(flag, command)
                tables.setdefault(package, {})[key] = read
            else:
                raise _unknown(flag, given, rest, command)
        except ConfigError as error:
            if mistakes is None:
                raise
            mistakes.append(error)
    return (*files, Source(name="command line", tables=tables))


def _of_no_use(flag: str, command: str) -> ConfigError:
    reason = f"it means nothing to `invrl {command}`, which does not train"
    fix = f"leave it out; `invrl {command} --help` lists what it takes"
    return ConfigError("command line", flag, reason, fix)


def _unknown(flag: str, given: str | None, rest: list[str], command: str) -> ConfigError:
    """For a flag that is none, which takes what looks like its value with it, or for a stray value."""
    own = [name for name, leaf in _LEAF_OF.items() if settings_of(command).uses(leaf.table, leaf.key)]
    fix = nearest_setting(flag, [*own, CONFIG_FLAG])
    if not flag.startswith("--"):
        return ConfigError("command line", flag, "no flag takes this", fix)
    if given is None and rest and not rest[0].startswith("--"):
        rest.pop(0)
    return ConfigError("command line", flag, "no such flag", fix)


def take_value(flag: str, given: str | None, rest: list[str]) -> str:
    """What `flag` was given, or else the next of `rest`. Raises ConfigError if there is none."""
    if given is None and (not rest or rest[0].startswith("--")):
        raise ConfigError(flag, "", "a value is missing", f"write {flag} VALUE")
    return rest.pop(0) if given is None else given


def _upstream_value(given: str | None, rest: list[str]) -> Scalar:
    """As typed: a number, true/false, or text; a flag with nothing behind it is true."""
    if given is None:
        if not rest or rest[0].startswith("--"):
            return True
        given = rest.pop(0)
    if given.lower() in ("true", "false"):
        return given.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):  # "007" and "1e400" are text: what was typed is passed on
            if str(value := number(given)) == given:
                return value
    return given


def flag_help(command: str = "train") -> str:
    """Every flag of the command, by section, with its default."""
    settings = settings_of(command)
    lines = [
        "sources:",
        *_entry(f"{CONFIG_FLAG} FILE", _CONFIG_HELP),
    ]
    for table, section in SECTIONS.items():
        leaves = [leaf for leaf in LEAVES if leaf.table == table and settings.uses(table, leaf.key)]
        if not leaves:
            continue
        lines += ["", f"[{table}] {(section.__doc__ or '').strip().splitlines()[0]}"]
        for leaf in leaves:
            names = f"{leaf.flag}, --no-{leaf.flag[2:]}" if leaf.is_switch else f"{leaf.flag} {_kind(leaf)}"
            lines += _entry(names, f"{leaf.info.description} (default: {leaf.info.default!r})")
    lines += ["", "options of other packages (checked against the installed version):"]
    for package in settings.packages:
        lines += _entry(f"--{package}-*", _PACKAGE_HELP[package])
    return "\n".join(lines)


def _kind(leaf: Leaf) -> str:
    """What stands for the value in the help: the choices, or the type."""
    annotation = leaf.info.annotation
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return "A,B"
    return "N" if annotation is int else "X" if annotation is float else "TEXT"


def _entry(names: str, text: str) -> list[str]:
    head, column = f"  {names}", " " * 36
    lines = textwrap.wrap(text, 110, initial_indent=column, subsequent_indent=column)
    return [head, *lines] if len(head) > 34 else [head + lines[0][len(head) :], *lines[1:]]
