"""The command line as a source of configuration: one flag per setting.

What most runs set needs no prefix: `lr` of [train] is `--lr`. Any other setting has the
table's name before it: `--kl.coefficient`. It turns an optional table on; `--gate`
does so with the defaults, and `--no-gate` turns it off. A table that a choice reads has
no such flag: `--advantage gae` turns [critic] on. A boolean is `--x` or `--no-x`, and
`--no-x` is the absence of any other optional setting. Options of other packages pass
through as `--sglang-*`, `--router-*` and `--megatron-*`, settings of user code as
`--plugin.NAME.SETTING`. `flag_help.py` prints them."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import get_origin

from pydantic.fields import FieldInfo

from invrl.cli.arguments import split_flag, take_value
from invrl.cli.command_settings import settings_for_command
from invrl.cli.presets import configuration_file
from invrl.datasets.config import KIND_OF_OBJECTIVE
from invrl.errors import ConfigError
from invrl.run.settings.config import (
    CHOICES,
    SECTIONS,
    TABLES,
    UPSTREAM,
    Scalar,
    Source,
    read_toml,
    setting_name,
)
from invrl.run.settings.former_settings import former_fix
from invrl.run.settings.name_suggestions import nearest_setting
from invrl.types.section import (
    is_optional,
    is_switch,
    present_type,
    section_fields,
    section_tables,
)

CONFIG_FLAG = "--config"
_PLUGIN_FLAG = "--plugin."


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFlag:
    """Flag of one setting: `key` of the table `table`."""

    table: str
    key: str
    field: FieldInfo
    section: str
    """Section that has the table; for a setting in a section, that section."""
    name: str
    """Flag without its leading dashes, and with underscores."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """Flag that turns a switch off, or an optional setting or table."""
        if self.is_switch or self.is_table or is_optional(self.field):
            return "--no-" + self.name.replace("_", "-")
        return None

    @property
    def takes_several(self) -> bool:
        """Whether the arguments after its value, up to the next flag, are also its
        values, and whether a repeated flag adds more."""
        return get_origin(present_type(self.field)) is tuple

    @property
    def is_switch(self) -> bool:
        return is_switch(self.field)

    @property
    def is_table(self) -> bool:
        """Whether it stands for an optional table: for the table itself, or for its
        `kind`."""
        return self.name in TABLES

    @property
    def takes_value(self) -> bool:
        return not self.is_switch and (not self.is_table or self.key == "kind")


def _setting_flags() -> Iterator[SettingFlag]:
    for section, model in SECTIONS.items():
        tables = section_tables(model)
        for key, field in section_fields(model).items():
            if key not in tables:
                yield SettingFlag(
                    table=section,
                    key=key,
                    field=field,
                    section=section,
                    name=setting_name(section, key),
                )
    for table, (section, model) in TABLES.items():
        table_field = SECTIONS[section].model_fields[table]
        if (
            is_optional(table_field)
            and "kind" not in model.model_fields
            and table not in CHOICES
        ):
            yield SettingFlag(
                table=table,
                key="",
                field=table_field,
                section=section,
                name=table,
            )
        for key, field in model.model_fields.items():
            yield SettingFlag(
                table=table,
                key=key,
                field=field,
                section=section,
                name=table if key == "kind" else f"{table}.{key}",
            )


SETTING_FLAGS = list(_setting_flags())
_BY_FLAG = {setting.flag: setting for setting in SETTING_FLAGS}
_BY_FLAG |= {
    setting.negative_flag: setting
    for setting in SETTING_FLAGS
    if setting.negative_flag is not None
}


def parse_flags(
    arguments: Sequence[str],
    mistakes: list[ConfigError] | None = None,
    *,
    command: str = "train",
) -> tuple[Source, ...]:
    """Return the sources of the command line of `command`: its TOML file, if any, then
    its flags. The file may set anything.

    Raises ConfigError for an unknown flag (with the nearest valid one), for a flag that
    the command does not use, for a missing value and for a stray one. With `mistakes`,
    the errors are added to it instead, and the wrong arguments are left out.
    """
    parser = _FlagParser(arguments, command)
    while parser.rest:
        try:
            parser.read_next()
        except ConfigError as error:
            if mistakes is None:
                raise
            mistakes.append(error)
    return (*parser.files, Source(name="command line", tables=parser.tables))


class _FlagParser:
    def __init__(self, arguments: Sequence[str], command: str) -> None:
        self.rest = list(arguments)
        """Arguments that have not been read yet."""
        self.files: list[Source] = []
        self.tables: dict[str, dict[str, Scalar | dict[str, Scalar]]] = {}
        self._command = command
        self._arguments = tuple(arguments)
        self._used = settings_for_command(command)

    def read_next(self) -> None:
        """Read one flag and its values. Raises ConfigError; the flag and its value are
        removed from `rest` even then."""
        flag, value = split_flag(self.rest.pop(0))
        setting = _BY_FLAG.get(flag)
        package = _option_package(flag)
        if setting is not None:
            self._read_setting(setting, flag, value)
        elif flag == CONFIG_FLAG:
            path = take_value(flag, value, self.rest)
            self.files.append(read_toml(configuration_file(path)))
        elif flag.startswith(_PLUGIN_FLAG):
            self._read_plugin_setting(flag, value)
        elif package is not None and not former_fix(flag):
            self._read_package_option(package, flag, value)
        else:
            raise self._unknown(flag, value)

    def _read_setting(self, setting: SettingFlag, flag: str, value: str | None) -> None:
        is_negative = flag == setting.negative_flag
        parsed: Scalar
        if is_negative or not setting.takes_value:
            if value is not None:
                raise ConfigError(
                    flag, value, "a switch takes no value", "write --name or --no-name"
                )
            parsed = not is_negative
        else:
            parsed = take_value(flag, value, self.rest)
            while (
                setting.takes_several
                and self.rest
                and not self.rest[0].startswith("--")
            ):
                parsed = f"{parsed},{self.rest.pop(0)}"
        if not self._used.uses(setting.table, setting.key):
            raise self._unused(flag)
        if setting.is_table and is_negative:
            self.tables.pop(setting.table, None)
            self._set(setting.section, setting.table, False)
            return
        if setting.is_table and not setting.takes_value:
            self.tables.setdefault(setting.table, {})
            return
        earlier = self.tables.get(setting.table, {}).get(setting.key)
        if setting.takes_several and isinstance(earlier, str) and not is_negative:
            parsed = f"{earlier},{parsed}"
        self._set(setting.table, setting.key, parsed)

    def _read_package_option(self, package: str, flag: str, value: str | None) -> None:
        parsed = _package_value(value, self.rest)
        if package not in self._used.packages:
            raise self._unused(flag)
        key = flag.removeprefix(f"--{package}-").replace("-", "_")
        self._set(package, key, parsed)

    def _read_plugin_setting(self, flag: str, value: str | None) -> None:
        parsed = _package_value(value, self.rest)
        if not self._used.uses("plugin", ""):
            raise self._unused(flag)
        name, _, key = flag.removeprefix(_PLUGIN_FLAG).rpartition(".")
        if not name:
            fix = f"write {_PLUGIN_FLAG}NAME.{key or 'SETTING'}, with the name after the colon of its path"
            raise ConfigError("command line", flag, "no setting of user code", fix)
        table = self.tables.setdefault("plugin", {}).setdefault(name, {})
        assert isinstance(table, dict)
        table[key.replace("-", "_")] = parsed

    def _set(self, table: str, key: str, value: Scalar) -> None:
        self.tables.setdefault(table, {})[key] = value

    def _unused(self, flag: str) -> ConfigError:
        reason = f"it means nothing to `invrl {self._command}`, which does not train"
        fix = f"leave it out; `invrl {self._command} --help` lists what it takes"
        return ConfigError("command line", flag, reason, fix)

    def _unknown(self, flag: str, value: str | None) -> ConfigError:
        """Return the error for an unknown flag, or for a value that no flag takes. A
        likely value of an unknown flag is removed with it."""
        names = [
            name
            for name, setting in _BY_FLAG.items()
            if self._used.uses(setting.table, setting.key)
        ]
        fix = _choice_fix(flag, names) or nearest_setting(
            flag, [*names, CONFIG_FLAG], on_file=self._trains_on_file
        )
        if not flag.startswith("--"):
            return ConfigError("command line", flag, "no flag takes this", fix)
        if value is None and self.rest and not self.rest[0].startswith("--"):
            self.rest.pop(0)
        return ConfigError("command line", flag, "no such flag", fix)

    @property
    def _trains_on_file(self) -> bool:
        """Whether the arguments, including later ones, say that the run trains on a
        file."""
        flags = [split_flag(argument)[0] for argument in self._arguments]
        if (
            "--data-path" in flags
            or self.tables.get("algorithm", {}).get("objective") in KIND_OF_OBJECTIVE
        ):
            return True
        return any("data_path" in file.tables.get("data", {}) for file in self.files)


def _choice_fix(flag: str, known_flags: Collection[str]) -> str:
    """Return the fix for the name of a table that a choice reads, `--critic` or
    `--no-critic`; "" for any other flag, or if the choice is none of the known ones."""
    name = flag.removeprefix("--").replace("-", "_")
    choice = CHOICES.get(name.removeprefix("no_"))
    if choice is None:
        return ""
    setting = "--" + choice.setting.replace("_", "-")
    if setting not in known_flags:
        return ""
    values = " or ".join(choice.values)
    if name.startswith("no_"):
        return f"write {setting} with a value other than {values}"
    return f"write {setting} {values}"


def _option_package(flag: str) -> str | None:
    """Return the package whose option this is."""
    for package in UPSTREAM:
        if flag.startswith(f"--{package}-"):
            return package
    return None


def _package_value(value: str | None, rest: list[str]) -> Scalar:
    """Return a number, true or false, or text, as it was typed; a flag without a value
    is true."""
    if value is None:
        if not rest or rest[0].startswith("--"):
            return True
        value = rest.pop(0)
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number_type in (int, float):
        # "007" and "1e400" stay text, passed on as typed.
        with contextlib.suppress(ValueError):
            number = number_type(value)
            if str(number) == value:
                return number
    return value
