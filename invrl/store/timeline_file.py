"""The run's `timeline.jsonl`: what the driver did and waited for over time, and how
busy the processes were.

One JSON object a line: the start of an incarnation, a span of time, or a sample of the
processes. Times are Unix seconds. Invariants: a line that is torn or of an unknown kind
is skipped; there are at most two files, the current one and its predecessor, each of at
most `MAX_BYTES` and a line.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from invrl.store.growing_file import GrowingFile

TIMELINE_NAME = "timeline.jsonl"
EARLIER_NAME = "timeline.1.jsonl"
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationStart:
    """A driver has begun to make steps after `step`."""

    time: float
    pid: int
    step: int
    restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An activity from `start` to `end`."""

    lane: str
    """Place of the work: driver, rollout, trainer, sync, checkpoint, evaluation or
    teacher."""
    name: str
    step: int
    start: float
    end: float
    waits_for: str = ""
    """Reason that the driver waited; "" if it worked itself."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of its phases, which may overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """SGLang's report of one engine."""

    name: str
    running: int
    """Requests that sample."""
    waiting: int
    """Requests in its queue."""
    kv_use: float
    """Used share of the KV cache."""
    cache_hit_rate: float | None = None
    """Share of the last prompts' tokens that were in the cache. SGLang counts this and
    the next one only with its own metrics on."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySample:
    """Turns that ended since the last sample, and the event loop's lag in the last
    minute."""

    requests: int
    latency_p50_s: float | None = None
    """Duration of a turn: queue, prompt and sampling. None without a turn."""
    latency_p95_s: float | None = None
    loop_lag_s: float | None = None
    """Longest over all workers."""
    cache_hit_rate: float | None = None
    """Share of these turns' prompt tokens that the engines had cached."""
    tokens_per_s: float | None = None
    """Sampled tokens of these turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The processes at one time."""

    time: float
    engines: tuple[EngineSample, ...] = ()
    gateway: GatewaySample | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    """Resident bytes by kind of process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything read, in the order of the file."""

    starts: tuple[IncarnationStart, ...] = ()
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()


Entry = IncarnationStart | Span | Sample
_KINDS: dict[str, type[Entry]] = {
    "start": IncarnationStart,
    "span": Span,
    "sample": Sample,
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
EntryT = TypeVar("EntryT", bound=Entry)


class TimelineWriter:
    """Appends to the timeline of the run folder `run`, after the lines of earlier
    incarnations. Raises OSError, except for a full disk."""

    def __init__(self, run: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = run / TIMELINE_NAME
        self._earlier_path = run / EARLIER_NAME
        self._max_bytes = max_bytes
        self._file = GrowingFile(self._path)
        if self._file.size and not self._ends_with_line():
            self._file.append(b"\n")  # a killed run left half a line

    def write(self, entry: Entry) -> None:
        """Write a line immediately, so that it survives a killed run."""
        fields: dict[str, Any] = {
            "kind": _KIND_OF[type(entry)],
            **msgspec.to_builtins(entry),
        }
        self._file.append(json.dumps(_rounded(fields)).encode() + b"\n")
        if self._file.size >= self._max_bytes:
            self._rotate()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        os.replace(self._path, self._earlier_path)
        self._file = GrowingFile(self._path)

    def _ends_with_line(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def _rounded(value: Any) -> Any:
    """Round to four decimals, which are enough and shorter."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


def read_timeline(run: Path) -> Timeline:
    """Read the timeline of a run folder, empty if there is none. Lines that are torn,
    or unknown to this version, are skipped."""
    entries: list[Entry] = []
    for name in (EARLIER_NAME, TIMELINE_NAME):
        try:
            content = (run / name).read_bytes()
        except OSError:  # there is none, or it was rotated away meanwhile
            continue
        for line in content.split(b"\n"):
            entry = _entry(line)
            if entry is not None:
                entries.append(entry)
    return Timeline(
        starts=_of_kind(entries, IncarnationStart),
        spans=_of_kind(entries, Span),
        samples=_of_kind(entries, Sample),
    )


def _of_kind(entries: list[Entry], kind: type[EntryT]) -> tuple[EntryT, ...]:
    return tuple(entry for entry in entries if isinstance(entry, kind))


def _entry(line: bytes) -> Entry | None:
    try:
        fields = msgspec.json.decode(line)
        kind = _KINDS.get(fields.pop("kind", "")) if isinstance(fields, dict) else None
        if kind is None:
            return None
        return msgspec.convert(fields, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        return None
