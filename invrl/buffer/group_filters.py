"""Which complete groups are trained: the built-in group filters, and the user's."""

from functools import partial

from invrl.buffer.comparison import comparisons
from invrl.buffer.config import RewardBaseline
from invrl.interfaces import GroupFilter
from invrl.plugins import load_plugin
from invrl.reasons import DropReason
from invrl.types import Group

ZERO_VARIANCE = str(DropReason.ZERO_VARIANCE)


def nonzero_variance(group: Group, *, baseline: RewardBaseline = "depth") -> str | None:
    """Drops a group in which no reward differs from those that it is compared with: its advantages are all 0,
    so it would teach nothing and dilute the mean (DAPO's dynamic sampling, arXiv 2503.14476, section 3.2).
    Rewards of turns, branches and children are compared with rewards of the same kind (`comparison.py`)."""
    if any(comparison.differs for comparison in comparisons(group, baseline)):
        return None
    return ZERO_VARIANCE


def keep_all(group: Group) -> str | None:
    return None


GROUP_FILTERS: dict[str, GroupFilter] = {"nonzero_variance": nonzero_variance, "none": keep_all}


def group_filter_function(name: str, baseline: RewardBaseline = "depth") -> GroupFilter:
    """The built-in filter of that name, or the user's function at `module:name`. The built-in one compares
    rewards of turns with this baseline. Raises PluginError."""
    function = load_plugin(name, "group_filter", GroupFilter, GROUP_FILTERS)
    if function is nonzero_variance and baseline == "group":
        return partial(nonzero_variance, baseline="group")
    return function
