"""Rewards of each task's groups so far, for a group filter with the parameter
`history`.

Kept only if the filter asks for it, and part of the buffer's snapshot. It is bounded:
the last groups of a task one by one and the rest as sums, for the most recent tasks.
"""

from collections.abc import Iterable
from dataclasses import replace

from invrl.types.groups import GroupOutcome, TaskHistory

RECENT_GROUPS = 16
"""Groups of a task that are kept one by one."""
MAX_TASKS = 100_000
"""Tasks with a history. Beyond it, the least recent one is forgotten."""


class RewardHistory:
    """Histories by the source's task id; a task that returns in a later epoch continues
    its history."""

    def __init__(self, max_tasks: int = MAX_TASKS) -> None:
        self._max_tasks = max_tasks
        self._tasks: dict[str, TaskHistory] = {}
        """Least recent task first."""

    def of(self, task_id: str) -> TaskHistory:
        """Return the complete groups of this task so far."""
        return self._tasks.get(task_id) or TaskHistory(task_id=task_id)

    def note(self, outcome: GroupOutcome) -> None:
        """Add a group if it is complete: a partial one says nothing certain about its
        task."""
        if not outcome.complete:
            return
        before = self.of(outcome.task_id)
        self._tasks.pop(outcome.task_id, None)
        self._tasks[outcome.task_id] = replace(
            before,
            num_groups=before.num_groups + 1,
            num_kept=before.num_kept + (not outcome.dropped),
            num_rollouts=before.num_rollouts + len(outcome.rewards_G),
            num_solved=before.num_solved + outcome.num_solved,
            reward_sum=before.reward_sum + sum(outcome.rewards_G),
            recent=(*before.recent, outcome)[-RECENT_GROUPS:],
        )
        if len(self._tasks) > self._max_tasks:
            del self._tasks[next(iter(self._tasks))]

    def snapshot(self) -> tuple[TaskHistory, ...]:
        return tuple(self._tasks.values())

    def restore(self, histories: Iterable[TaskHistory]) -> None:
        self._tasks = {history.task_id: history for history in histories}
