"""Least time of a run under the rule `wait`, from the lengths of its rollouts alone.

Step v is a waiting part, from the time at which the engine has version v until batch v
is taken, and a training part of fixed length. No token of batch v is more than k
versions older than v, so all of its rollouts run between the arrival of version v - k
and the time at which batch v is taken: 2k + 1 parts, k of which are training. That is
also what the admission of k + 1 batches allows. Batches are the groups in their order:
if every group begins as early as it may, no other order keeps all tokens young enough.

A step of an engine with n requests takes token_s + request_s (n - 1). Summed over a part
in which the engine is busy, that is

    seconds = (token_s - request_s) * steps + request_s * tokens

so the least time is a linear program in the steps and tokens of each part. The tokens
X_p of a batch in parts p, with steps s_p, can be sampled by its rollouts if and only if
no rollout gets more than one token a step. By the theorem of Gale that is so if, for
each set J of parts,

    sum of X_p over J  <=  sum over the rollouts of min(length, sum of s_p over J)

The right side is the least of linear functions, which are added as they are violated.
The program knows all lengths, and may stop a rollout and continue it in a later part:
what it finds bounds every scheduler. The batches repeat without end, so that no time is
saved at an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

_GAIN = 1e-4
"""Growth of the least time, of which the last of several rounds must find less."""
_MAX_ROUNDS = 60
_CUTS = 4
"""Sets of parts of a batch whose bound is added in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    slots: int
    token_s: float
    request_s: float
    training_s: float


@dataclass(frozen=True, slots=True)
class _Row:
    """Sum of coefficients times variables, at most `limit`."""

    columns: Sequence[int]
    coefficients: Sequence[float]
    limit: float


class _Program:
    """Variables: the engine's steps in the waiting and in the training part of each
    step of the loop, then the tokens of each batch in each of its parts."""

    def __init__(
        self, batches: Sequence[Sequence[float]], max_staleness: int, pace: Pace
    ) -> None:
        self._pace = pace
        self._lengths = [np.sort(np.array(batch, float)) for batch in batches]
        self._num_parts = 2 * len(batches)
        self._width = 2 * max_staleness + 1
        if self._width > self._num_parts:
            raise ValueError(f"{len(batches)} batches, staleness {max_staleness}")
        sets = np.arange(1, 2**self._width)[:, None] >> np.arange(self._width)
        self._sets = (sets & 1).astype(bool)
        self._rows = [*self._capacities(), *self._training_times()]
        for batch, lengths in enumerate(self._lengths):
            whole = np.ones(self._width, bool)
            self._rows.append(self._cut(batch, whole, lengths[-1] - 0.5))

    def least_seconds(self) -> float:
        """Return the least time of one repetition of the batches."""
        seconds = 0.0
        for _ in range(_MAX_ROUNDS):
            before = seconds
            seconds, values = self._solve()
            cuts = self._violated(values)
            if not cuts or seconds - before < _GAIN * seconds:
                break
            self._rows += cuts
        return seconds

    def _parts(self, batch: int) -> list[int]:
        first = 2 * batch + 1 - self._width
        return [(first + place) % self._num_parts for place in range(self._width)]

    def _tokens(self, batch: int) -> list[int]:
        """Return the variables of the batch's tokens, by its parts."""
        first = self._num_parts + batch * self._width
        return list(range(first, first + self._width))

    def _tokens_by_part(self) -> list[list[int]]:
        by_part: list[list[int]] = [[] for _ in range(self._num_parts)]
        for batch in range(len(self._lengths)):
            for part, column in zip(
                self._parts(batch), self._tokens(batch), strict=True
            ):
                by_part[part].append(column)
        return by_part

    def _capacities(self) -> Iterator[_Row]:
        """No step of the engine makes more tokens than there are slots."""
        for part, columns in enumerate(self._tokens_by_part()):
            coefficients = [1.0] * len(columns)
            yield _Row([*columns, part], [*coefficients, -float(self._pace.slots)], 0.0)

    def _training_times(self) -> Iterator[_Row]:
        for part, columns in enumerate(self._tokens_by_part()):
            if part % 2:
                per_token = [self._pace.request_s] * len(columns)
                yield _Row(
                    [*columns, part],
                    [*per_token, self._pace.token_s - self._pace.request_s],
                    self._pace.training_s,
                )

    def _cut(self, batch: int, parts: NDArray[np.bool_], steps: float) -> _Row:
        """Return the linear bound of the tokens in these parts that is exact where they
        have so many steps."""
        lengths = self._lengths[batch]
        num_shorter = int(np.searchsorted(lengths, steps, side="right"))
        num_longer = float(len(lengths) - num_shorter)
        tokens = [self._tokens(batch)[place] for place in np.flatnonzero(parts)]
        part_steps = [self._parts(batch)[place] for place in np.flatnonzero(parts)]
        return _Row(
            [*tokens, *part_steps],
            [1.0] * len(tokens) + [-num_longer] * len(part_steps),
            float(lengths[:num_shorter].sum()),
        )

    def _solve(self) -> tuple[float, NDArray[np.float64]]:
        num_batches = len(self._lengths)
        num_variables = self._num_parts + num_batches * self._width
        cost = np.zeros(num_variables)
        for part, columns in enumerate(self._tokens_by_part()):
            if part % 2 == 0:
                cost[part] = self._pace.token_s - self._pace.request_s
                cost[columns] = self._pace.request_s
        whole = [
            _Row(self._tokens(batch), [1.0] * self._width, float(lengths.sum()))
            for batch, lengths in enumerate(self._lengths)
        ]
        solved = linprog(
            cost,
            A_ub=_matrix(self._rows, num_variables),
            b_ub=[row.limit for row in self._rows],
            A_eq=_matrix(whole, num_variables),
            b_eq=[row.limit for row in whole],
            method="highs",
        )
        if not solved.success:
            raise RuntimeError(solved.message)
        return solved.fun + num_batches * self._pace.training_s, solved.x

    def _violated(self, values: NDArray[np.float64]) -> list[_Row]:
        cuts: list[_Row] = []
        for batch, lengths in enumerate(self._lengths):
            sums = np.concatenate([[0.0], np.cumsum(lengths)])
            steps = self._sets @ values[self._parts(batch)]
            tokens = self._sets @ values[self._tokens(batch)]
            num_shorter = np.searchsorted(lengths, steps, side="right")
            most = sums[num_shorter] + steps * (len(lengths) - num_shorter)
            excess = tokens - most
            for place in np.argsort(-excess)[:_CUTS]:
                if excess[place] > 1.0:
                    cuts.append(self._cut(batch, self._sets[place], steps[place]))
        return cuts


def _matrix(rows: Sequence[_Row], num_columns: int) -> csr_array:
    counts = [len(row.columns) for row in rows]
    return csr_array(
        (
            np.concatenate([row.coefficients for row in rows]),
            np.concatenate([row.columns for row in rows]),
            np.cumsum([0, *counts]),
        ),
        shape=(len(rows), num_columns),
    )


def least_seconds(
    batches: Sequence[Sequence[float]], *, max_staleness: int, pace: Pace
) -> float:
    """Return the least time in which the rollouts of these lengths, by batches, are
    sampled and trained, while no token is more than `max_staleness` versions old."""
    return _Program(batches, max_staleness, pace).least_seconds()
