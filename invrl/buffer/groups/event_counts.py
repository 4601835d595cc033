"""Counts of the buffer's events: since the start of the run, since the last batch, and
for the metrics of a step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from invrl.types.metrics import Mean, Metric, Sum, merge
from invrl.types.reasons import DropReason, FailureReason


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCounts:
    """Counts of the buffer at one moment."""

    states: Mapping[str, int]
    """Groups and rollouts in each state, by names such as `groups_ready` and
    `rollouts_trained`. Ended ones are counted since the start of the run."""
    failed: Mapping[str, int]
    """Rollouts failed since the start of the run, by reason."""
    dropped: Mapping[str, int]
    """Groups dropped since the start of the run, by reason."""


def dropped_group_name(reason: DropReason, filter_reason: str = "") -> str:
    """Return the name under which a drop is counted, with the word of the group filter
    that caused it, if any."""
    if filter_reason:
        return f"{reason}/{filter_reason}"
    return str(reason)


class EventCounts:
    """Counts groups that were completed or dropped, and rollouts that failed."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        """Groups dropped since the start, by reason."""
        self.failed: Counter[str] = Counter()
        """Rollouts failed since the start, by reason, including those that count with a
        reward."""
        self.complete_since_take = 0
        """Groups whose rollouts have all finished since the last batch was taken."""
        self._dropped_before_take: Counter[str] = Counter()
        self._failed_before_take: Counter[str] = Counter()
        self._metrics: dict[str, Metric] = {}
        """Events since the last call of `take_metrics`."""

    def restore(self, *, dropped: Mapping[str, int], failed: Mapping[str, int]) -> None:
        """Continue from the counts of an earlier incarnation of the run."""
        self.dropped = Counter(dropped)
        self.failed = Counter(failed)
        self.start_batch()

    def start_batch(self) -> None:
        """Restart the counts since the last batch."""
        self.complete_since_take = 0
        self._dropped_before_take = Counter(self.dropped)
        self._failed_before_take = Counter(self.failed)

    @property
    def dropped_since_take(self) -> dict[str, int]:
        """Groups dropped since the last batch was taken, by reason."""
        return dict(self.dropped - self._dropped_before_take)

    @property
    def failed_since_take(self) -> dict[str, int]:
        """Rollouts failed since the last batch was taken, by reason."""
        return dict(self.failed - self._failed_before_take)

    def note_failure(self, reason: FailureReason) -> None:
        """Count a failed rollout."""
        self.failed[reason] += 1
        self.count(f"rollouts_failed/{reason}")

    def note_drop(
        self, reason: DropReason, num_groups: int, filter_reason: str = ""
    ) -> None:
        """Count dropped groups. `filter_reason` is the word of the group filter that
        dropped them."""
        name = dropped_group_name(reason, filter_reason)
        self.dropped[name] += num_groups
        self.count(f"groups_dropped/{name}", num_groups)

    def count(self, name: str, number: int = 1) -> None:
        """Add a number of events to the metric of this name."""
        self.note({name: Sum(number)})

    def note(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = merge([self._metrics, metrics])

    def take_metrics(self) -> dict[str, Metric]:
        """Return events since the last call. `failed_share/<reason>` is a share of the
        rollouts that ended."""
        metrics = self._metrics
        self._metrics = {}
        num_ended = metrics.get("rollouts_ended", Sum(0)).value()
        for reason in FailureReason:
            failed = metrics.get(f"rollouts_failed/{reason}")
            if failed is not None:
                metrics[f"failed_share/{reason}"] = Mean(failed.value(), num_ended)
        return metrics
