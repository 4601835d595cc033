"""Tasks that are only numbers: the source for environments that make a task from a
seed."""

from collections.abc import Iterator
from itertools import count, islice

from invrl.types.tasks import Task

_HELD_OUT = 1000
"""Tasks of the split "eval", whose seeds no training task has."""
_FIRST_TRAINING_SEED = 1_000_000
_NUM_TRAINING_SEEDS = 2**31 - _FIRST_TRAINING_SEED
"""Generators such as NumPy's take seeds below 2**32, or 2**31."""
_APART = 10**9


def seeds(split: str, seed: int) -> Iterator[Task]:
    """Yield tasks with the payload {"seed": N}. Those of another seed of the run begin
    at another number."""
    numbers = (
        _FIRST_TRAINING_SEED + (number + seed * _APART) % _NUM_TRAINING_SEEDS
        for number in count()
    )
    if split != "train":
        numbers = islice(count(), _HELD_OUT)
    for number in numbers:
        yield Task(id=f"seed-{number}", payload={"seed": number}, split=split)
