"""Rows that a step trains: a function of the settings, the seed and the step alone, so
that a run that resumes needs nothing but its step. Pure.

The passes over the file follow each other without a gap, and batches are cut from that
sequence. So every batch is full, except the last one of `data.epochs` passes, and a
batch may hold the end of one pass and the beginning of the next."""

import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Draw:
    """One row in one pass over the file: both from 0."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """Order of `num_rows` >= 1 rows. `epochs` is the number of passes; 0 for no end."""

    num_rows: int
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int

    def last_step(self, num_steps: int) -> int:
        """Return the step that completes all passes; `num_steps` if passes have no
        end."""
        if not self.epochs:
            return num_steps
        return -(-self.num_rows * self.epochs // self.batch_size)

    def batch(self, step: int) -> list[Draw]:
        """Return the rows of a step, from 1."""
        begin = (step - 1) * self.batch_size
        end = begin + self.batch_size
        if self.epochs:
            end = min(end, self.num_rows * self.epochs)
        draws: list[Draw] = []
        for place in range(begin, end):
            epoch, place_in_epoch = divmod(place, self.num_rows)
            index = place_in_epoch
            if self.shuffle:
                index = _shuffled(self.num_rows, self.seed, epoch)[place_in_epoch]
            draws.append(Draw(epoch, index))
        return draws


def split_off(num_rows: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of training and of held-out rows, both ascending. At least one
    row is held out."""
    num_held_out = max(1, round(num_rows * fraction))
    held_out = set(
        random.Random(f"held-out rows/{seed}").sample(range(num_rows), num_held_out)
    )
    kept = [index for index in range(num_rows) if index not in held_out]
    return kept, sorted(held_out)


@lru_cache(maxsize=2)
def _shuffled(num_rows: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"rows/{seed}/{epoch}").sample(range(num_rows), num_rows)
