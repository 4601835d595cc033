"""Extra columns: numbers of a rollout in addition to its reward, such as process
rewards, weights or a verifier's score. The setting `extra_columns` declares each of
them once, by name and level.

Invariant: a declared name can be a column of a training sample next to those that invrl
computes itself. The gateway checks numbers against the declaration where they arrive
(`gateway/sessions/number_checks.py`), and `buffer/samples/training_samples.py` makes
them columns and numbers of samples."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

Level = Literal["token", "turn", "rollout"]
"""Unit that has a number: each sampled token of a turn, each turn, or the whole
rollout."""

RESERVED_NAMES = frozenset(
    {
        "advantages",
        "current",
        "entropy",
        "length_slope",
        "length_weight",
        "old",
        "reference",
        "returns",
        "reward_shaping",
        "rewards",
        "rollout",
        "solved",
        "teacher",
        "values",
    }
)
"""Columns and numbers of a sample that invrl computes itself."""
MAX_COLUMNS = 64
MAX_COLUMN_NAME = 64
MAX_NUMBER = float(np.finfo(np.float32).max)
"""Largest absolute number: losses compute with float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraColumn:
    """One declared column."""

    name: str
    level: Level
    default: float = 0.0
    """Number of a token, turn or rollout that was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraNumbers:
    """Numbers of a rollout by the names of their columns."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    turn_numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Numbers by turn, then by name. A turn is named by its id, or by the id of its
    reply."""
    token_numbers: Mapping[str, Mapping[str, Sequence[float]]] = field(
        default_factory=dict
    )
    """Numbers by turn, then by name: one for each token that the turn sampled."""

    def __bool__(self) -> bool:
        return bool(self.numbers or self.turn_numbers or self.token_numbers)


def parse_extra_columns(entries: Iterable[str]) -> dict[str, ExtraColumn]:
    """Parse entries NAME:LEVEL or NAME:LEVEL=DEFAULT into columns by name, in the given
    order. Raises ValueError for any other entry, a reserved name, or a repeated
    name."""
    columns: dict[str, ExtraColumn] = {}
    for entry in entries:
        column = _parse_entry(entry)
        if column.name in columns:
            raise ValueError(
                f"the column {column.name!r} is given twice: name each column once"
            )
        columns[column.name] = column
    if len(columns) > MAX_COLUMNS:
        raise ValueError(
            f"{len(columns)} columns: at most {MAX_COLUMNS} can be declared"
        )
    return columns


def _parse_entry(entry: str) -> ExtraColumn:
    declaration, equals, default_text = (part.strip() for part in entry.partition("="))
    name, colon, level = (part.strip() for part in declaration.partition(":"))
    if not colon or level not in get_args(Level):
        levels = ", ".join(get_args(Level))
        raise ValueError(
            f"{entry!r} is not NAME:LEVEL or NAME:LEVEL=DEFAULT; LEVEL is one of: {levels}"
        )
    if not (name.isidentifier() and name.isascii()) or len(name) > MAX_COLUMN_NAME:
        raise ValueError(
            f"{entry!r}: {name!r} is no name; use letters, digits and underscores, with a letter first, "
            f"at most {MAX_COLUMN_NAME} characters"
        )
    if name in RESERVED_NAMES:
        raise ValueError(
            f"{entry!r}: invrl computes a column {name!r} itself; use another name, such as my_{name}"
        )
    default = 0.0
    if equals:
        default = _parse_default(entry, default_text)
    return ExtraColumn(name=name, level=level, default=default)  # type: ignore[arg-type]


def _parse_default(entry: str, text: str) -> float:
    try:
        default = float(text)
    except ValueError:
        default = math.nan
    if not is_number(default):
        raise ValueError(
            f"{entry!r}: the default {text!r} is not a finite number within float32"
        )
    return default


def is_number(value: float) -> bool:
    """Whether the value is finite, also as a float32."""
    return abs(value) <= MAX_NUMBER  # False for NaN
