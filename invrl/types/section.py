"""The base class of every configuration section: frozen, and unknown keys are refused.

Sections are declared beside their owners and composed in `run/settings/config.py`. All
of it imports without torch or Ray.

An absent setting is `None`, and an absent table is a feature that is turned off. TOML
has no word for absence, so `false` stands for it where a source turns off what another
one, or the default, turns on.
"""

from collections.abc import Collection, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo


def _split_at_commas(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    return [part for part in parts if part]


Text = Annotated[str, Field(min_length=1)]
"""A non-empty text; an absent text is None."""
COMMA_SEPARATED = BeforeValidator(_split_at_commas)
"""Annotates a tuple field that is an array in TOML and "a,b" as a flag."""


class Choice(NamedTuple):
    """Values of a setting that read a table."""

    setting: str
    values: tuple[str, ...]
    """The table alone chooses the first."""


class Section(BaseModel):
    """One table of the configuration. A field's `description` is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    chosen_by: ClassVar[Mapping[str, Choice]] = {}
    """Optional tables that hold the settings of a choice."""
    kinds: ClassVar[Mapping[str, "type[Section]"]] = {}
    """The models of a section that has one of several, by the name of each."""
    plain_flags: ClassVar[Collection[str] | None] = None
    """The settings of a section whose flags have no table before them. None: all of
    them."""

    @model_validator(mode="before")
    @classmethod
    def _read_absence(cls, values: Any) -> Any:
        """Read `false` as the absence of an optional setting that is no switch."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            key: None
            if value is False
            and key in fields
            and is_optional(fields[key])
            and not is_switch(fields[key])
            else value
            for key, value in values.items()
        }


def section_fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The settings of a section; where it has kinds, those of all of them."""
    fields = dict(section.model_fields)
    for kind in section.kinds.values():
        for name, field in kind.model_fields.items():
            fields.setdefault(name, field)
    return fields


def is_optional(field: FieldInfo) -> bool:
    """Whether the setting, or the table, may be absent."""
    return NoneType in get_args(field.annotation)


def is_switch(field: FieldInfo) -> bool:
    """Whether the setting is a boolean. An absent one leaves the decision to the
    run."""
    return present_type(field) is bool


def present_type(field: FieldInfo) -> Any:
    """Return the type of a setting where it is present."""
    present = field.annotation
    if is_optional(field):
        [present] = [part for part in get_args(present) if part is not NoneType]
    while get_origin(present) is Annotated:
        present = get_args(present)[0]
    return present


def section_tables(section: type[Section]) -> Mapping[str, type[Section]]:
    """The tables of a section, by the names of their fields."""
    tables: dict[str, type[Section]] = {}
    for name, field in section.model_fields.items():
        present = present_type(field)
        if isinstance(present, type) and issubclass(present, Section):
            tables[name] = present
    return tables


def merged(below: object, above: Mapping[str, object]) -> dict[str, object]:
    """Merge a table over the same table from an earlier source."""
    if not isinstance(below, Mapping):
        return dict(above)
    table: dict[str, object] = {**below, **above}
    for name, entries in above.items():
        if isinstance(entries, Mapping):
            table[name] = merged(below.get(name), entries)
    return table


def with_choices(
    section: type[Section], values: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Add a choice for each table, and a table for each choice that reads one. `given`
    are the settings that come from no preset."""
    chosen = dict(values)
    for table, choice in section.chosen_by.items():
        value = chosen.get(choice.setting)
        if chosen.get(table, False) in (None, False):
            if value in choice.values and chosen.get(table) is None:
                chosen[table] = {}
        elif value not in choice.values:
            if table not in given:  # it is the preset's, and another choice was given
                del chosen[table]
            elif choice.setting not in given:
                chosen[choice.setting] = choice.values[0]
    return chosen
