"""Settings of the environment that a run starts."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveFloat

from invrl.types.section import Section, Text

_BETWEEN = re.compile(r",(?=\s*[A-Za-z_]\w*=)")


def split_arguments(text: str) -> list[str]:
    """Split a flag's text at the commas before a `name=`: values such as JSON may hold
    commas."""
    return [part.strip() for part in _BETWEEN.split(text) if part.strip()]


def _split_if_text(value: object) -> object:
    return split_arguments(value) if isinstance(value, str) else value


class EnvironmentConfig(Section):
    """The environment that the run starts in a virtual environment of its own, and that
    leases its tasks."""

    kind: Text = Field(
        description="name of an environment (`invrl environment list`), or ./FOLDER of your own"
    )
    args: Annotated[tuple[str, ...], BeforeValidator(_split_if_text)] = Field(
        (), description="its arguments, each name=value"
    )
    step_timeout_s: PositiveFloat = Field(
        60.0,
        description="seconds that it may compute between two calls of the model",
    )
