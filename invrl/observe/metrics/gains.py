"""What training gained on a held-out set, as the run writes it down at its end."""

from dataclasses import dataclass

GAINS_NAME = "gains.json"
"""The file in the report folder: a list of `MeasuredGain`, one for each set and
mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGain:
    """Accuracies before and after training, and their difference with its 95 %
    interval."""

    name: str
    """The set and the mode: "easy/greedy", or the mode alone."""
    tasks: int
    before: float
    after: float
    value: float
    low: float
    high: float
