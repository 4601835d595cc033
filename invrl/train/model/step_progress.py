"""Progress of a rank in its training step: what it computes, and how many micro-batches
of that have begun."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """`begun` of `planned` micro-batches of the current pass over the model."""

    work: str = ""
    """Such as "gradients"; "" between two steps."""
    begun: int = 0
    planned: int = 0
    """0: not counted."""
    mini_batch: int = 0
    """Number from 1; 0: the pass is over all of them."""
    mini_batches: int = 0

    def __str__(self) -> str:
        """Format as "gradients, micro-batch 3 of 12 (mini-batch 1 of 2)"; "" between
        two steps."""
        text = self.work
        if self.work and self.planned:
            text += f", micro-batch {self.begun} of {self.planned}"
        if self.work and self.mini_batches > 1 and self.mini_batch:
            text += f" (mini-batch {self.mini_batch} of {self.mini_batches})"
        return text


@dataclass(slots=True, eq=False)
class StepProgress:
    """Progress that one thread writes and others read: `place` is replaced as a
    whole."""

    place: StepPlace = field(default_factory=StepPlace)

    def next_mini_batch(self, mini_batches: int) -> None:
        number = self.place.mini_batch + 1
        self.place = StepPlace(mini_batch=number, mini_batches=mini_batches)

    def begin(self, work: str) -> None:
        self.place = replace(self.place, work=work, begun=0, planned=0)

    def end_pass(self) -> None:
        self.begin("")

    def end(self) -> None:
        """End the step."""
        self.place = StepPlace()

    def counted(self, items: Iterable[Item], planned: int) -> Iterator[Item]:
        """Yield the items of a pass, each of which begins when it is taken."""
        self.place = replace(self.place, begun=0, planned=planned)
        for item in items:
            self.place = replace(self.place, begun=self.place.begun + 1)
            yield item
