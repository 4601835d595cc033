"""What the times of tokens say about a pause of generation. Pure functions; times are
in seconds of the monotonic clock, a list for each stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of time."""

    start: float
    end: float


def longest_gap(streams: Sequence[Sequence[float]], window: Window) -> float:
    """The longest time between two tokens of one stream, of those times that overlap
    the window, or 0."""
    gaps = [
        later - earlier
        for earlier, later in chain.from_iterable(map(pairwise, streams))
        if later > window.start and earlier < window.end
    ]
    return max(gaps, default=0.0)


def longest_silence(streams: Sequence[Sequence[float]], window: Window) -> float:
    """As `longest_gap`, but the time in which no stream has a token."""
    return longest_gap([sorted(chain.from_iterable(streams))], window)


def decode_step(streams: Sequence[Sequence[float]], windows: Sequence[Window]) -> float:
    """The median time between two tokens of one stream, of those that are both within
    one of the windows. Raises ValueError if there are none."""
    return median(_gaps_within(streams, windows))


def _gaps_within(
    streams: Sequence[Sequence[float]], windows: Sequence[Window]
) -> Iterator[float]:
    for earlier, later in chain.from_iterable(map(pairwise, streams)):
        if any(window.start <= earlier and later <= window.end for window in windows):
            yield later - earlier
