"""The base of every configuration section: frozen, unknown keys refused. Sections are declared beside
their owners and composed in `config.py`; all of it imports without torch or ray."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the configuration. A field's `description` is its `--help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
