"""A curriculum: picks the next task of a list by how often the model has solved each
one so far.

It keeps a Beta distribution of each task's success rate, which forgets, because the
model changes. A scheme of `CURRICULA` picks by these distributions. Invariants: the
picks depend only on the seed and on the outcomes so far; a task with an open group is
picked again only when every task has as many open groups; `state` is everything that
`restore` needs.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from invrl.types.groups import GroupOutcome
from invrl.types.tasks import Json, Task

PRIOR = 1.0
"""Both parameters of the Beta distribution of an unseen task: all success rates are
equally likely."""
TARGET_SUCCESS_RATE = 0.5
MAX_TASKS = 100_000

Scheme = Callable[[NDArray[np.float64], NDArray[np.float64], np.random.Generator], int]
"""Picks one of K tasks by the parameters of their distributions, alpha_K and beta_K."""


def learnability(
    alpha_K: NDArray[np.float64],
    beta_K: NDArray[np.float64],
    generator: np.random.Generator,
) -> int:
    """Draw a task with a probability in proportion to its learnability p (1 - p), the
    variance of success (Foster et al., "Learning to Reason at the Frontier of
    Learnability", arXiv 2502.12272).

    The paper measures p by extra rollouts and takes the tasks with the highest values.
    Without extra rollouts, this is the expectation of p (1 - p) under the distribution
    of p, alpha beta / ((alpha + beta) (alpha + beta + 1)), which is never 0, so no task
    is abandoned.
    """
    total_K = alpha_K + beta_K
    return _draw(alpha_K * beta_K / (total_K * (total_K + 1.0)), generator)


def thompson(
    alpha_K: NDArray[np.float64],
    beta_K: NDArray[np.float64],
    generator: np.random.Generator,
) -> int:
    """Draw a success rate for every task from its distribution and pick the task whose
    draw is nearest to 0.5 (MoPPS: Qu et al., arXiv 2507.04632; the strategy "topk" of
    verl's `recipe/mopps/mopps.py`). There the nearest B of a random part of the tasks
    are picked for a whole batch; here one of all tasks."""
    success_rate_K = generator.beta(alpha_K, beta_K)
    return int(np.argmin(np.abs(success_rate_K - TARGET_SUCCESS_RATE)))


def prioritized(
    alpha_K: NDArray[np.float64],
    beta_K: NDArray[np.float64],
    generator: np.random.Generator,
) -> int:
    """Draw a task with a probability in proportion to 1 - p, so hard tasks come more
    often (prioritized sampling of Kimi k1.5, arXiv 2501.12599). p is the mean of the
    distribution, alpha / (alpha + beta), so a task that is always solved still comes
    occasionally."""
    return _draw(beta_K / (alpha_K + beta_K), generator)


CURRICULA: dict[str, Scheme] = {
    "learnability": learnability,
    "thompson": thompson,
    "prioritized": prioritized,
}


class Curriculum(Iterator[Task]):
    """Tasks in the order that the scheme picks them, without an end. It is an
    `OutcomeRecorder` and a `StateKeeper` (`interfaces.py`), like a user's own source
    may be."""

    def __init__(
        self, tasks: Sequence[Task], scheme: Scheme, *, decay: float, seed: int
    ) -> None:
        """`tasks` has at least one, with distinct ids. `decay` is the part of the
        earlier evidence about a task that is kept at each of its groups, in [0, 1]."""
        self._tasks = tasks
        self._scheme = scheme
        self._decay = decay
        self._seed = seed
        self._index = {task.id: index for index, task in enumerate(tasks)}
        self._alpha_K = np.full(len(tasks), PRIOR)
        self._beta_K = np.full(len(tasks), PRIOR)
        self._open_K = np.zeros(len(tasks), np.int64)
        """Number of open groups of each task."""
        self._num_picks = 0

    def __next__(self) -> Task:
        fewest_open = np.flatnonzero(self._open_K == self._open_K.min())
        # A separate generator for each pick, so that the state is one number.
        pick_seed = random.Random(
            f"curriculum/{self._seed}/{self._num_picks}"
        ).getrandbits(64)
        generator = np.random.default_rng(pick_seed)
        picked = self._scheme(
            self._alpha_K[fewest_open], self._beta_K[fewest_open], generator
        )
        index = int(fewest_open[picked])
        self._num_picks += 1
        self._open_K[index] += 1
        return self._tasks[index]

    def record(self, outcome: GroupOutcome) -> None:
        """Update the distribution of a task with a complete group of s solved and f
        unsolved rollouts:

            alpha <- decay alpha + (1 - decay) prior + s,    beta <- decay beta + (1 - decay) prior + f

        (MoPPS, arXiv 2507.04632: the streaming posterior with temporal discounting.) A
        group that was dropped before it was complete changes nothing: its finished
        rollouts ended early for a reason.
        """
        index = self._index[outcome.task_id]
        self._open_K[index] = max(0, self._open_K[index] - 1)
        if not outcome.complete:
            return
        num_unsolved = len(outcome.rewards_G) - outcome.num_solved
        kept_prior = (1.0 - self._decay) * PRIOR
        self._alpha_K[index] = (
            self._decay * self._alpha_K[index] + kept_prior + outcome.num_solved
        )
        self._beta_K[index] = (
            self._decay * self._beta_K[index] + kept_prior + num_unsolved
        )

    def state(self) -> dict[str, Json]:
        """Return [alpha, beta, open groups] of the picked tasks, by id."""
        seen = (self._alpha_K != PRIOR) | (self._beta_K != PRIOR) | (self._open_K > 0)
        tasks: dict[str, Json] = {}
        for index in np.flatnonzero(seen):
            tasks[self._tasks[int(index)].id] = [
                float(self._alpha_K[index]),
                float(self._beta_K[index]),
                int(self._open_K[index]),
            ]
        return {"picks": self._num_picks, "num_tasks": len(self._tasks), "tasks": tasks}

    def restore(self, state: Json) -> None:
        """Restore a state. Raises ValueError for the state of another list of tasks."""
        stored = cast(Mapping[str, Json], state)
        tasks = cast(Mapping[str, tuple[float, float, int]], stored["tasks"])
        unknown = [task_id for task_id in tasks if task_id not in self._index]
        if unknown or stored["num_tasks"] != len(self._tasks):
            raise ValueError(
                f"the state is of {stored['num_tasks']} tasks{_among(unknown)}, the list has "
                f"{len(self._tasks)}: a run resumes only on the tasks that it began with"
            )
        self._num_picks = cast(int, stored["picks"])
        for task_id, (alpha, beta, num_open) in tasks.items():
            index = self._index[task_id]
            self._alpha_K[index] = alpha
            self._beta_K[index] = beta
            self._open_K[index] = num_open


def _among(unknown: Sequence[str]) -> str:
    return f", among them {unknown[0]!r}" if unknown else ""


def _draw(weight_K: NDArray[np.float64], generator: np.random.Generator) -> int:
    """Draw one of K with a probability in proportion to its weight."""
    sum_K = np.cumsum(weight_K)
    return int(
        np.searchsorted(sum_K, generator.random() * sum_K[-1], side="right").clip(
            max=len(sum_K) - 1
        )
    )
