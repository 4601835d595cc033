"""Where the buffer's groups are, in words: what a deadline error tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferCounts:
    needed: int
    ready: int
    unreleased: int
    """Of the ready ones, those with tokens of a version whose canary has not passed."""
    in_flight: int
    limit: int
    dropped: dict[str, int]
    """Groups dropped since the start, by reason."""
    failed: dict[str, int]
    """Rollouts failed since the start, by reason."""
    source_end: str
    """Why the task source gives no more; "" while it does."""

    @property
    def can_fill(self) -> bool:
        """Whether a batch can still come together."""
        return not self.source_end or self.ready + self.in_flight >= self.needed

    def __str__(self) -> str:
        text = f"{self.needed} groups; {self.ready} ready"
        if self.unreleased:
            text += f" ({self.unreleased} of them wait for their weight version's release)"
        text += f", {self.in_flight} in flight (at most {self.limit} under way)"
        for name, counts in (("groups dropped", self.dropped), ("rollouts failed", self.failed)):
            if counts:
                text += f"; {name}: " + ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))
        return text + (f"; {self.source_end}" if self.source_end else "")
