"""Admission: bounds the work under way, and so the staleness of what is trained."""

from dataclasses import dataclass

from invrl.buffer.config import BufferConfig


@dataclass(frozen=True, slots=True)
class Admission:
    """Maximum numbers of groups. A new one is leased while neither is reached."""

    under_way: int | None
    """Groups in flight, ready, or taken while the new version is not there yet. None:
    the concurrency of rollouts is the only bound of those in flight."""
    ready: int | None
    """Complete groups that wait for the trainer. None: no bound of their own."""

    def __str__(self) -> str:
        if self.under_way is not None:
            return f"at most {self.under_way} under way"
        return f"no new ones while {self.ready} are ready"

    def admits(
        self, *, in_flight: int, ready: int, taken: int, reserve: int = 0
    ) -> bool:
        """Return whether a new group may be leased. `reserve` groups of those that may
        be under way are held back."""
        under_way = in_flight + ready + taken + reserve
        if self.under_way is not None and under_way >= self.under_way:
            return False
        return self.ready is None or ready < self.ready


def configured_admission(config: BufferConfig, batch_size: int) -> Admission:
    """Return the bounds of a run. `batch_size` is in groups.

    Groups are taken oldest first. So with at most (max_staleness + 1) batches under
    way, a group is taken at most `max_staleness` versions after it was leased, unless
    others that began later overtake it. Over-sampled groups are added on top: they
    replace filtered groups, and surplus ones are part of the next batch.
    """
    if config.admission == "ready":
        most_ready = config.max_staleness * batch_size + config.over_sampling_groups
        return Admission(under_way=None, ready=most_ready)
    batches = (config.max_staleness + 1) * batch_size
    return Admission(under_way=batches + config.over_sampling_groups, ready=None)
