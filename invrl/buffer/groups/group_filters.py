"""Group filters: which complete groups are trained, by a built-in or the user's
function."""

from functools import partial

from invrl.buffer.config import BufferConfig, DifficultyConfig, RewardBaseline
from invrl.buffer.samples.comparison import comparisons
from invrl.interfaces import GroupFilter, HistoryGroupFilter
from invrl.types.groups import Group, TaskHistory
from invrl.types.reasons import DropReason
from invrl.user_code.plugins import load_group_filter

ZERO_VARIANCE = str(DropReason.ZERO_VARIANCE)
TOO_HARD = "too_hard"
TOO_EASY = "too_easy"


def nonzero_variance(group: Group, *, baseline: RewardBaseline = "depth") -> str | None:
    """Drop a group in which no reward differs from those it is compared with: its
    advantages are all 0, so it would teach nothing and dilute the mean (DAPO's dynamic
    sampling, arXiv 2503.14476, section 3.2). Rewards of turns, trajectories and
    children are compared with rewards of the same kind (`comparison.py`)."""
    if any(comparison.differs for comparison in comparisons(group, baseline)):
        return None
    return ZERO_VARIANCE


def medium_difficulty(
    group: Group,
    *,
    history: TaskHistory,
    low: float = 0.2,
    high: float = 0.8,
    num_groups: int = 4,
    success_reward: float = 1.0,
    baseline: RewardBaseline = "depth",
) -> str | None:
    """Drop a group like `nonzero_variance`, or because the model solves its task too
    rarely or too often: keep it if low <= p <= high, where p is the share of rewards of
    at least `success_reward` among the last `num_groups` groups of the task, including
    this one.

    This is balanced online difficulty filtering (Bae et al., arXiv 2504.03380), which
    takes p from the one group; `num_groups` = 1 is exactly that. With small groups, p
    over several is less often wrong by chance. The bounds 0.2 and 0.8 and the 4 groups
    are our defaults.
    """
    reason = nonzero_variance(group, baseline=baseline)
    if reason is not None:
        return reason
    num_solved = sum(rollout.reward >= success_reward for rollout in group.rollouts_G)
    num_rollouts = len(group.rollouts_G)
    num_earlier = min(num_groups - 1, len(history.recent))
    for earlier in history.recent[len(history.recent) - num_earlier :]:
        num_solved += earlier.num_solved
        num_rollouts += len(earlier.rewards_G)
    success_rate = num_solved / num_rollouts
    if success_rate < low:
        return TOO_HARD
    if success_rate > high:
        return TOO_EASY
    return None


def keep_all(group: Group) -> str | None:
    return None


GROUP_FILTERS: dict[str, GroupFilter | HistoryGroupFilter] = {
    "nonzero_variance": nonzero_variance,
    "medium_difficulty": medium_difficulty,
    "none": keep_all,
}


def group_filter_function(
    name: str, baseline: RewardBaseline = "depth"
) -> GroupFilter | HistoryGroupFilter:
    """Return the built-in filter of that name, or the user's function at `module:name`.
    The built-in one compares rewards of turns with this baseline. Raises
    PluginError."""
    function = load_group_filter(name, GROUP_FILTERS)
    if function is nonzero_variance and baseline == "group":
        return partial(nonzero_variance, baseline="group")
    return function


def configured_group_filter(config: BufferConfig) -> GroupFilter | HistoryGroupFilter:
    """Return the filter that the settings name, with their bounds. Raises
    PluginError."""
    function = group_filter_function(config.group_filter, config.turn_rewards.baseline)
    if function is medium_difficulty:
        bounds = config.difficulty or DifficultyConfig.model_validate({})
        return partial(
            medium_difficulty,
            low=bounds.low,
            high=bounds.high,
            num_groups=bounds.groups,
            success_reward=config.success_reward,
            baseline=config.turn_rewards.baseline,
        )
    return function
