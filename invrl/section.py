"""The base of every configuration section: frozen, unknown keys refused. Sections are declared beside
their owners and composed in `run/config.py`; all of it imports without torch or ray."""

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _parts(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


COMMA_SEPARATED = BeforeValidator(_parts)
"""Annotates a tuple field: an array in TOML, "a,b" as a flag."""


class Section(BaseModel):
    """One table of the configuration. A field's `description` is its `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
