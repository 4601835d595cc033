"""All rollouts of one task, how such a group ended, and the history of a task."""

from dataclasses import dataclass

from invrl.types.reasons import DropReason
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one task, one per index."""

    id: str
    task_id: str
    rollouts_G: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """How a group ended, as its task source is told it and as the history of its task
    keeps it.

    A group that is kept ends, in this sense, when it is complete: it is trained later,
    unless its tokens are too old or lost by then."""

    task_id: str
    """As the task source gave it, without the "@n" of a task that comes back."""
    group_id: str
    version: WeightVersion
    """The trainer's version at that time, which is the number of batches trained."""
    rewards_G: tuple[float, ...]
    """Of the rollouts that finished, in the order of their indices. Fewer than the
    group's size if it is not complete."""
    num_solved: int
    """How many of these rewards are at least --success-reward."""
    complete: bool
    """Whether all rollouts of the group finished."""
    dropped: str = ""
    """Why the group is not trained: "zero_variance", "filtered/<the filter's word>",
    "stale", "incomplete" and so on (`DropReason`). "" if it is kept."""

    @property
    def success_rate(self) -> float | None:
        """The share of these rewards that are at least --success-reward. None without a
        reward."""
        if not self.rewards_G:
            return None
        return self.num_solved / len(self.rewards_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """The complete groups that a task has had so far in the run, whether they were kept
    or dropped."""

    task_id: str
    """As in `GroupOutcome`."""
    num_groups: int = 0
    num_kept: int = 0
    """Groups that no filter dropped."""
    num_rollouts: int = 0
    num_solved: int = 0
    """Rollouts with a reward of at least --success-reward."""
    reward_sum: float = 0.0
    recent: tuple[GroupOutcome, ...] = ()
    """The last groups, oldest first; at most 16."""

    @property
    def success_rate(self) -> float | None:
        """The share of solved rollouts over all groups. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.num_solved / self.num_rollouts

    @property
    def mean_reward(self) -> float | None:
        """Over all rollouts. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.reward_sum / self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was dropped while rollouts of it ran. Those rollouts are to be
    cancelled."""

    group_id: str
    reason: DropReason

    @property
    def detail(self) -> str:
        """The message with which its rollouts are cancelled."""
        return f"group {self.group_id} was dropped ({self.reason}): this rollout is no longer needed"
