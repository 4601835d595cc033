"""The gain from training on a held-out set, as the run records it at its end."""

from dataclasses import dataclass

GAINS_NAME = "gains.json"
"""File in the report folder: a list of `MeasuredGain`, one for each set and mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGain:
    """Accuracies before and after training, and their difference with its 95 %
    interval."""

    name: str
    """Set and mode: "easy/greedy", or only the mode."""
    tasks: int
    before: float
    after: float
    value: float
    low: float
    high: float
