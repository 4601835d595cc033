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
    """Outcome of a group, as its task source gets it and the history of its task keeps
    it.

    A kept group ends, in this sense, when it is complete: it is trained later, unless
    its tokens are too old or lost by then.
    """

    task_id: str
    """Id from the task source, without the "@n" of a repeated task."""
    group_id: str
    version: WeightVersion
    """The trainer's version at that time, which is the number of trained batches."""
    rewards_G: tuple[float, ...]
    """Rewards of finished rollouts in the order of their indices. Fewer than the
    group's size if it is not complete."""
    num_solved: int
    """Number of these rewards that are at least --success-reward."""
    complete: bool
    """Whether all rollouts of the group finished."""
    dropped: str = ""
    """Reason that the group is not trained: "zero_variance", "filtered/<the filter's
    word>", "stale", "incomplete" and so on (`DropReason`). "" if it is kept."""

    @property
    def success_rate(self) -> float | None:
        """Share of these rewards that are at least --success-reward. None without a
        reward."""
        if not self.rewards_G:
            return None
        return self.num_solved / len(self.rewards_G)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """Complete groups of a task so far in the run, kept or dropped."""

    task_id: str
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
        """Share of solved rollouts over all groups. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.num_solved / self.num_rollouts

    @property
    def mean_reward(self) -> float | None:
        """Mean over all rollouts. None before the first group."""
        if not self.num_rollouts:
            return None
        return self.reward_sum / self.num_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was dropped while its rollouts ran, which must now be cancelled."""

    group_id: str
    reason: DropReason

    @property
    def detail(self) -> str:
        """Message with which its rollouts are cancelled."""
        return f"group {self.group_id} was dropped ({self.reason}): this rollout is no longer needed"
