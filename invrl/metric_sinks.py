"""Where a step's numbers go. Invariant: a failing sink is logged once and left out; it never stops
training. Called by the driver (`cluster.py`) with what `metrics.resolve` makes."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """One destination; may raise, `SinkSet` does not."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """`metrics.jsonl`: one object per step with `step` and `time` (Unix seconds), flushed at once, so that
    a dead run keeps every step. What is not finite is null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard's event file, through its own record format: no torch, no tensorflow, no thread."""

    def __init__(self, folder: Path) -> None:
        # protobuf makes these names at run time
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._event, self._summary = Event, Summary
        self._write(file_version="brain.Event:2")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def _write(self, **content: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class SinkSet:
    """All sinks as one that never raises."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(step, values)
            except Exception:
                logger.exception("%s failed at step %d and is left out from now on", _name(sink), step)
                self._sinks.remove(sink)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                logger.exception("%s failed to close", _name(sink))
        self._sinks.clear()


def open_sinks(metrics_path: Path, tensorboard_path: Path | None) -> SinkSet:
    """The run's sinks; one that cannot be opened is logged and left out."""
    sinks: list[Sink] = [JsonlSink(metrics_path)]
    if tensorboard_path is not None:
        try:
            sinks.append(TensorBoardSink(tensorboard_path))
        except Exception:
            logger.exception("TensorBoard events are left out")
    return SinkSet(sinks)


def _name(sink: Sink) -> str:
    return type(sink).__name__
