"""Ratios and their history. Pure but for reading and appending one file.

A ratio is of two measurements of one run, taken in turns, so that it says more about
the code than about the machine's other load. A later run is compared with the median of
those before it on the same kind of machine. A ratio of speeds should not fall, and a
ratio of costs should not rise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

TARGETS = {
    "gateway_router": 0.95,
    "fleet": 0.95,
    "trainer": 0.95,
    "trainer_unshared": 0.95,
    "busy_share": 0.90,
}
"""Ratio -> the least it should be."""
WORST_FALL = 0.10
WORST_RISE = 0.25
"""More than the worst fall: costs are wall time, which other work of the machine
lengthens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens per second, ours and the reference's, one entry each per repetition."""

    ours: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ratios = [
            ours / theirs
            for ours, theirs in zip(self.ours, self.reference, strict=True)
        ]
        return {
            "ratio": round(median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
            "tokens_per_s": round(median(self.ours), 1),
            "reference_tokens_per_s": round(median(self.reference), 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run in the history. `machine` and `model` say what it may be compared
    with."""

    date: str
    commit: str
    machine: str
    model: str
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part of a measurement found: ratios, and what they come from under names
    of their own."""

    ratios: Mapping[str, float]
    details: Mapping[str, Any]
    failure: str = ""
    """Why it has no ratios, or what went wrong while they were measured; "" where
    nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A ratio that fell by more than `WORST_FALL`, or rose by more than
    `WORST_RISE`."""

    name: str
    now: float
    before: float
    """The median of the runs before."""
    runs: int

    def __str__(self) -> str:
        direction = "fell" if self.now < self.before else "rose"
        change = f"{self.now / self.before - 1:+.0%} from " if self.before else "from "
        return f"{self.name} {direction} to {self.now:.3f}: {change}{self.before:.3f} in {self.runs} runs"


def falls(now: Entry, history: Sequence[Entry]) -> list[Change]:
    """Each ratio of `now` against the median of the runs of the same machine and model
    that have it."""
    changes = _changes(now, history)
    return [
        change for change in changes if change.now < (1 - WORST_FALL) * change.before
    ]


def rises(now: Entry, history: Sequence[Entry]) -> list[Change]:
    """As `falls`, for ratios of costs."""
    changes = _changes(now, history)
    return [
        change for change in changes if change.now > (1 + WORST_RISE) * change.before
    ]


def _changes(now: Entry, history: Sequence[Entry]) -> Iterator[Change]:
    """Every ratio that the runs before have."""
    comparable = [
        entry
        for entry in history
        if (entry.machine, entry.model) == (now.machine, now.model)
    ]
    for name, value in now.ratios.items():
        values = [entry.ratios[name] for entry in comparable if name in entry.ratios]
        if values:
            yield Change(name=name, now=value, before=median(values), runs=len(values))


def missed(
    ratios: Mapping[str, float], targets: Mapping[str, float] = TARGETS
) -> list[str]:
    """The ratios that are below their target, if they have one."""
    return [name for name, value in ratios.items() if value < targets.get(name, 0.0)]


def exceeded(costs: Mapping[str, float], targets: Mapping[str, float]) -> list[str]:
    """The costs that are above their target, if they have one."""
    return [
        name for name, value in costs.items() if value > targets.get(name, float("inf"))
    ]


def read_history(path: Path) -> list[Entry]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Entry(**json.loads(line)) for line in lines if line.strip()]


def append_history(path: Path, entry: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
