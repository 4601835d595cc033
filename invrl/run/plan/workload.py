"""The lengths, rates and machine of a run, and the bounds on its speed that follow from
them in closed form. Pure.

    barrier    a batch starts when nothing runs, and ends with its longest rollout
    packed     every slot is in use
    bound      (barrier + training + update) / max(packed, training + update)

The bound is the most that an asynchronous run gains over a synchronous one while
engines and trainer have their own GPUs.
"""

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

_BATCHES = 40
"""Batches whose lengths are drawn for the mean of a bound."""


class Lengths(Protocol):
    def of_group(self, number: int) -> Sequence[float]:
        """Return the lengths of a group's rollouts, in tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Half of the variance of the logarithm is the task's."""

    mean: float
    sigma: float
    group_size: int
    seed: int = 0

    def of_group(self, number: int) -> Sequence[int]:
        return _drawn_lengths(self, number)


@lru_cache(maxsize=1024)
def _drawn_lengths(lengths: LognormalLengths, number: int) -> Sequence[int]:
    """Draw once what each rollout of the group asks for."""
    random = np.random.default_rng((lengths.seed, number))
    deviation = lengths.sigma / math.sqrt(2)
    of_task = random.normal(0, deviation)
    of_rollouts_G = random.normal(0, deviation, lengths.group_size)
    center = math.log(lengths.mean) - lengths.sigma**2 / 2
    lengths_G = np.exp(center + of_task + of_rollouts_G)
    return [max(1, round(length)) for length in lengths_G.tolist()]


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Lengths of recorded groups, which repeat."""

    groups: Sequence[Sequence[float]]

    def of_group(self, number: int) -> Sequence[float]:
        return self.groups[number % len(self.groups)]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Times are in seconds."""

    lengths: Lengths
    groups: int
    """Groups of a batch."""
    group_size: int
    slots: int
    """Rollouts that run at a time, over all engines."""
    num_engines: int = 1
    token_s: float
    """Step of an engine with one request."""
    request_s: float
    """Time that each further request adds to a step of its engine."""
    training_s: float
    """Training step of a batch."""
    update_s: float = 0.0
    """Weight update."""

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size

    def step_s(self, num_running: int) -> float:
        """Return the time of an engine's step, in which each request gets a token,
        while the engines share `num_running` requests evenly."""
        further = max(0.0, num_running / self.num_engines - 1)
        return self.token_s + self.request_s * further

    @cached_property
    def batches(self) -> Sequence[Sequence[float]]:
        """Lengths of the first batches."""
        batches: list[Sequence[float]] = []
        for first in range(0, _BATCHES * self.groups, self.groups):
            batch: list[float] = []
            for number in range(first, first + self.groups):
                batch += self.lengths.of_group(number)
            batches.append(batch)
        return batches

    @property
    def mean_length(self) -> float:
        return statistics.fmean(length for batch in self.batches for length in batch)

    @property
    def packed_s(self) -> float:
        """Time in which the engines generate a batch while all slots are in use."""
        tokens = self.rollouts * self.mean_length
        return tokens * self.step_s(self.slots) / self.slots

    @property
    def trainer_s(self) -> float:
        """Time in which the trainer makes a version and gives it to the engines."""
        return self.training_s + self.update_s

    @property
    def barrier_s(self) -> float:
        """Mean time of the generation of a batch alone."""
        return statistics.fmean(self._generation_s(batch) for batch in self.batches)

    @property
    def best_step_s(self) -> float:
        """Least time of a step, whatever the staleness."""
        return max(self.packed_s, self.trainer_s)

    @property
    def bound(self) -> float:
        """Most that an asynchronous run is faster than a synchronous one."""
        return (self.barrier_s + self.trainer_s) / self.best_step_s

    def _generation_s(self, lengths: Sequence[float]) -> float:
        """Return the time until rollouts of these lengths, started in this order as
        slots become free, have ended."""
        waiting = list(reversed(lengths))
        ends: list[float] = []
        tokens = seconds = 0.0
        while waiting or ends:
            while waiting and len(ends) < self.slots:
                heapq.heappush(ends, tokens + waiting.pop())
            step_s = self.step_s(len(ends))
            end = heapq.heappop(ends)
            seconds += (end - tokens) * step_s
            tokens = end
        return seconds
