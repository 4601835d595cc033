"""The phases of a driver: where the work of each happens, and what the driver waits for
meanwhile.

Invariant: a phase that began is announced to the observer, and its span follows even
after an error.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from invrl.observe.sinks.sinks import Sink
from invrl.store.timeline_file import Span


@dataclass(frozen=True, slots=True)
class _Place:
    lane: str
    waits_for: str
    """Empty if the driver itself works."""


PLACES = {
    "starting": _Place("driver", "processes"),
    "rollout": _Place("rollout", "rollouts"),
    "assemble": _Place("driver", ""),
    "teacher": _Place("teacher", "teacher"),
    "gpu_turn": _Place("trainer", "engines"),
    "train": _Place("trainer", "trainer"),
    "record": _Place("driver", ""),
    "sync": _Place("sync", "engines"),
    "checkpoint": _Place("checkpoint", "disk"),
    "evaluating": _Place("evaluation", "rollouts"),
}
"""Places by the phase's name. Other phases are the driver's own work."""
_OWN = _Place("driver", "")


def waited_for(phase: str) -> str:
    """Return what the driver waits for in a phase; "" if it works itself."""
    return PLACES.get(phase, _OWN).waits_for


@contextmanager
def observed_phase(observer: Sink, name: str, step: int) -> Iterator[dict[str, float]]:
    """Announce the phase, and report its span at the end of the block, which may fill
    in the seconds of the phase's parts."""
    observer.phase(name, step)
    parts: dict[str, float] = {}
    began = time.monotonic()
    try:
        yield parts
    finally:
        report_span(observer, name, step, began=began, parts=parts)


def report_span(
    observer: Sink,
    name: str,
    step: int,
    *,
    began: float,
    parts: Mapping[str, float] | None = None,
) -> None:
    """Report the span of a phase that ends now. `began`: on the monotonic clock."""
    place = PLACES.get(name, _OWN)
    end = time.time()
    span = Span(
        lane=place.lane,
        name=name,
        step=step,
        start=end - (time.monotonic() - began),
        end=end,
        waits_for=place.waits_for,
        parts=parts or {},
    )
    observer.span(span)
