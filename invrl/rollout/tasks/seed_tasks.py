"""Tasks that are only numbers: the source for environments that make a task from a
seed."""

from collections.abc import Iterator
from itertools import count, islice

from invrl.types.tasks import Task

_HELD_OUT = 1000
"""Tasks of the split "eval", whose seeds no training task has."""
_FIRST_TRAINING_SEED = 1_000_000


def seeds(split: str, seed: int) -> Iterator[Task]:
    """Yield tasks with the payload {"seed": N}. Those of another seed of the run come
    from other numbers."""
    numbers = (number + seed * 10**9 for number in count(_FIRST_TRAINING_SEED))
    if split != "train":
        numbers = islice(count(), _HELD_OUT)
    for number in numbers:
        yield Task(id=f"seed-{number}", payload={"seed": number}, split=split)
