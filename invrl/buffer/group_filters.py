"""The buffer's decisions as pure functions: which groups count, how many may be under way."""

from functools import partial

from invrl.buffer.comparison import comparisons
from invrl.buffer.config import BufferConfig, RewardBaseline
from invrl.interfaces import GroupFilter
from invrl.plugins import load_plugin
from invrl.types import DropReason, Group

ZERO_VARIANCE = str(DropReason.ZERO_VARIANCE)


def nonzero_variance(group: Group, *, baseline: RewardBaseline = "depth") -> str | None:
    """Drops a group in which no reward differs from those that it is compared with: its advantages are all 0,
    so it would teach nothing and dilute the mean (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).
    Rewards of turns, branches and children are compared with their like (`comparison.py`)."""
    differs = any(comparison.differs for comparison in comparisons(group, baseline))
    return None if differs else ZERO_VARIANCE


GROUP_FILTERS: dict[str, GroupFilter] = {"nonzero_variance": nonzero_variance, "none": lambda group: None}


def group_filter_function(name: str, baseline: RewardBaseline = "depth") -> GroupFilter:
    """The built-in of that name, with this baseline of turn rewards, or the user's function at `module:name`.
    Raises PluginError."""
    function = load_plugin(name, "group_filter", GroupFilter, GROUP_FILTERS)
    if function is nonzero_variance and baseline == "group":
        return partial(nonzero_variance, baseline="group")
    return function


def admission_limit(config: BufferConfig, batch_size: int) -> int:
    """Groups that may be under way at once: in flight, ready, or taken and not yet behind a new version.

    Groups are taken oldest first, so with at most (k + 1) batches under way the last of them is taken at most
    k versions after it was leased. Over-sampled groups come on top: they replace those that are filtered out,
    and what is left of them ages until it is dropped."""
    return (config.max_staleness + 1) * batch_size + config.over_sampling_groups
