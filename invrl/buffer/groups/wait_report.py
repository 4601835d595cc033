"""Report of what the next batch waits for: counts since the last batch was taken."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from invrl.buffer.ledger.open_group import OpenGroup
from invrl.store.run_store import ExternalWaits
from invrl.types.groups import Group
from invrl.types.reasons import DropReason

_NUM_SHOWN = 3
"""Number of kinds of rewards that `shown_rewards` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group with rollouts that have not ended."""

    group_id: str
    task_id: str
    missing: int
    """Rollouts that have not ended."""
    size: int
    since_s: float = 0.0
    """Seconds since its rollouts were last leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitReport:
    wanted: int
    """Groups in a batch."""
    ready: int
    in_flight: tuple[WaitingGroup, ...]
    complete: int
    """Groups whose rollouts have all finished since the last batch was taken, including
    dropped ones."""
    dropped: Mapping[str, int]
    """Groups dropped since then, by reason."""
    failed: Mapping[str, int]
    """Rollouts failed since then, by reason."""
    filter_name: str
    filtered_rewards: Mapping[str, int]
    """Groups that the filter dropped in a row until now, by their rewards."""
    filtered_limit: int
    """Number of groups in a row that it may drop; 0: any number."""
    source_end: str = ""
    outside: ExternalWaits | None = None
    """Environments not started by us that run the rollouts."""

    @property
    def filtered_streak(self) -> int:
        """Number of groups that the filter dropped in a row until now."""
        return sum(self.filtered_rewards.values())


@dataclass(slots=True)
class FilteredStreak:
    """Groups that the filter dropped since it last kept one, by their rewards."""

    by_rewards: Counter[str] = field(default_factory=Counter)

    def dropped(self, group: Group, reason: str) -> None:
        """Count a dropped group with the filter's reason."""
        rewards = [rollout.reward for rollout in group.rollouts_G]
        low = min(rewards)
        high = max(rewards)
        text = f"{low:g} to {high:g}"
        if low == high:
            text = f"all {low:g}"
        if reason != DropReason.ZERO_VARIANCE:
            text += f", {reason}"
        self.by_rewards[text] += 1

    def kept(self) -> None:
        self.by_rewards.clear()

    @property
    def length(self) -> int:
        return self.by_rewards.total()


def shown_rewards(by_rewards: Mapping[str, int]) -> str:
    """Format as "rewards: 60 x all 1, 4 x all 0", the most frequent first; the rest as
    "2 x others"."""
    ordered = Counter(by_rewards).most_common()
    parts = [f"{count} x {text}" for text, count in ordered[:_NUM_SHOWN]]
    num_others = sum(count for _, count in ordered[_NUM_SHOWN:])
    if num_others:
        parts.append(f"{num_others} x others")
    return "rewards: " + ", ".join(parts)


def waiting_group(group: OpenGroup) -> WaitingGroup:
    """Return a group in flight, without the time it has waited."""
    size = len(group.states_G)
    num_missing = size - len(group.finished)
    return WaitingGroup(
        group_id=group.id, task_id=group.task_id, missing=num_missing, size=size
    )


def early_groups(count: int) -> str:
    """Return the note about ready groups with tokens of a version whose canary has not
    passed; "" for none."""
    if not count:
        return ""
    return f" ({count} of them wait for the canary of their weight version)"


def counts_by_reason(name: str, counts: Mapping[str, int]) -> str:
    """Format as "groups dropped: 2 stale, 4 zero_variance"; "" for none."""
    if not counts:
        return ""
    parts = [f"{count} {reason}" for reason, count in sorted(counts.items())]
    return f"{name}: {', '.join(parts)}"
