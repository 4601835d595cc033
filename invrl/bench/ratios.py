"""Ratios and their history. Pure but for reading and appending one file.

A ratio is of two measurements of one run, taken in turns, so that it says more about the code than about the
machine's other load. A later run is compared with the median of those before it on the same kind of machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

TARGETS = {
    "gateway_router": 0.95,
    "fleet": 0.95,
    "trainer": 0.95,
    "trainer_unshared": 0.95,
    "busy_share": 0.90,
}
"""Ratio -> the least it should be."""
WORST_FALL = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Tokens per second, ours and the reference's, one entry each per repetition."""

    ours: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        ratios = [ours / theirs for ours, theirs in zip(self.ours, self.reference, strict=True)]
        return {
            "ratio": round(median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
            "tokens_per_s": round(median(self.ours), 1),
            "reference_tokens_per_s": round(median(self.reference), 1),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run in the history. `machine` and `model` say what it may be compared with."""

    date: str
    commit: str
    machine: str
    model: str
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A ratio that fell by more than `WORST_FALL`."""

    name: str
    now: float
    before: float
    runs: int

    def __str__(self) -> str:
        change = self.now / self.before - 1
        return f"{self.name} fell to {self.now:.3f}: {change:+.0%} from {self.before:.3f} in {self.runs} runs"


def falls(now: Entry, history: Sequence[Entry]) -> list[Fall]:
    """Each ratio of `now` against the median of the runs of the same machine and model that have it."""
    found = []
    for name, value in now.ratios.items():
        like = [one for one in history if (one.machine, one.model) == (now.machine, now.model)]
        values = [one.ratios[name] for one in like if name in one.ratios]
        if values and value < (1 - WORST_FALL) * median(values):
            found.append(Fall(name=name, now=value, before=median(values), runs=len(values)))
    return found


def missed(ratios: Mapping[str, float], targets: Mapping[str, float] = TARGETS) -> list[str]:
    """The ratios that are below their target, if they have one."""
    return [name for name, value in ratios.items() if value < targets.get(name, 0.0)]


def read_history(path: Path) -> list[Entry]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [Entry(**json.loads(line)) for line in lines if line.strip()]


def append_history(path: Path, entry: Entry) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
