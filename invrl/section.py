"""The base class of every configuration section: frozen, and unknown keys are refused.

Sections are declared beside their owners and composed in `run/config.py`. All of it
imports without torch or Ray.
"""

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _split_at_commas(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    return [part for part in parts if part]


COMMA_SEPARATED = BeforeValidator(_split_at_commas)
"""Annotates a tuple field that is an array in TOML and "a,b" as a flag."""


class Section(BaseModel):
    """One table of the configuration. A field's `description` is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
