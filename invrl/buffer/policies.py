"""The buffer's decisions as pure functions: which groups count, how many may be under way."""

from invrl.buffer.config import BufferConfig
from invrl.interfaces import GroupFilter
from invrl.plugins import load_plugin
from invrl.types import DropReason, Group

ZERO_VARIANCE = str(DropReason.ZERO_VARIANCE)


def nonzero_variance(group: Group) -> str | None:
    """Drops a group whose rewards are all equal: its advantages are all 0, so it would teach nothing and
    dilute the mean (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2). Rewards of single turns,
    branches and children are rewards too."""
    rewards = {rollout.reward for rollout in group.rollouts_G}
    for one in group.rollouts_G:
        rewards.update(*(own.values() for own in (one.turn_rewards, one.branch_rewards, one.child_rewards)))
    return ZERO_VARIANCE if len(rewards) == 1 else None


GROUP_FILTERS: dict[str, GroupFilter] = {"nonzero_variance": nonzero_variance, "none": lambda group: None}


def group_filter_function(name: str) -> GroupFilter:
    """The built-in of that name, or the user's function at `module:name`. Raises PluginError."""
    return load_plugin(name, "group_filter", GroupFilter, GROUP_FILTERS)


def admission_limit(config: BufferConfig, batch_size: int) -> int:
    """Groups that may be under way at once: in flight, ready, or taken and not yet behind a new version.

    Groups are taken oldest first, so with at most (k + 1) batches under way the last of them is taken at most
    k versions after it was leased. Over-sampled groups come on top: they replace those that are filtered out,
    and what is left of them ages until it is dropped."""
    return (config.max_staleness + 1) * batch_size + config.over_sampling_groups
