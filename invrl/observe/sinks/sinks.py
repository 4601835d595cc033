"""Destinations of a run's phases, metrics and messages: files, TensorBoard, experiment
trackers and the console.

Invariant: a failing sink is reported once and dropped; nobody waits for a slow or
hanging sink. Neither stops training. wandb and mlflow are imported only if a setting
asks for them.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.errors import DeadlineError
from invrl.host.files.disk import is_full, write_atomically
from invrl.host.output.printable import printable
from invrl.observe.samples.sampled_rollout import SampledRollout
from invrl.store.growing_file import GrowingFile
from invrl.store.run_folder import RunFolder
from invrl.store.timeline_file import (
    TIMELINE_NAME,
    IncarnationStart,
    Sample,
    Span,
    TimelineWriter,
)

if TYPE_CHECKING:
    from invrl.run.settings.config import Config
    from invrl.run.settings.run_config import RunConfig, WandbConfig

logger = logging.getLogger(__name__)
_EVAL_PREFIX = "eval/"
_EVAL_STEP = "eval/step"


class Sink:
    """One destination. Its methods may raise; those of `RunObserver` do not."""

    @property
    def shows_waits(self) -> bool:
        """Whether it uses `awaits`."""
        return False

    def phase(self, name: str, step: int) -> None:
        """Begin this phase of a step. Step 0 is before the first."""

    def awaits(self, text: str) -> None:
        """Show what the phase waits for now, such as "37 of 64 rollouts"; "" if
        unknown."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metric values of a finished step. Step 0 holds the evaluation
        before training. A later call may add an evaluation to an earlier step."""

    def span(self, span: Span) -> None:
        """Record a phase that has ended."""

    def sample(self, sample: Sample) -> None:
        """Record the current load of the processes."""

    def rollouts(self, step: int, rows: Sequence[SampledRollout]) -> None:
        """Record some rollouts of the step's batch for a person to read."""

    def note(self, text: str) -> None:
        """Show a message to the person at the console."""

    def failures(self, failed: Mapping[str, int]) -> None:
        """Record the rollouts that have failed since the start of the run, by
        reason."""

    def close(self) -> None: ...

    def __str__(self) -> str:
        return type(self).__name__


class PhaseFile(Sink):
    """Writes the current phase for other programs, as a JSON file with pid, step, phase
    and its start. On a full disk the file stays unchanged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def phase(self, name: str, step: int) -> None:
        since = round(time.time(), 3)
        content = {"pid": os.getpid(), "step": step, "phase": name, "since": since}
        try:
            write_atomically(self._path, json.dumps(content))
        except OSError as error:
            if not is_full(error):
                raise


class JsonlSink(Sink):
    """Writes `metrics.jsonl`: one object per step with `step` and `time` (Unix
    seconds), after every step, so that a dead run keeps all of them. Values that are
    not finite become null."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        row: dict[str, object] = {"step": step, "time": round(time.time(), 3)}
        for name, value in values.items():
            row[name] = None
            if math.isfinite(value):
                row[name] = value
        self._file.append(json.dumps(row).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class TimelineSink(Sink):
    """Writes `timeline.jsonl`, for a driver that continues after step `done`."""

    def __init__(self, run: Path, done: int) -> None:
        restart = (run / TIMELINE_NAME).exists()
        self._writer = TimelineWriter(run)
        start = IncarnationStart(
            time=time.time(), pid=os.getpid(), step=done, restart=restart
        )
        self._writer.write(start)

    def span(self, span: Span) -> None:
        self._writer.write(span)

    def sample(self, sample: Sample) -> None:
        self._writer.write(sample)

    def close(self) -> None:
        self._writer.close()


class TensorBoardSink(Sink):
    """Writes TensorBoard's event file in its record format, without torch, tensorflow
    or a thread. `done`: viewers forget the events of later steps in earlier files,
    because those steps are lost."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        # protobuf makes these names at run time
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = GrowingFile(folder / name)
        self._make_record_writer = RecordWriter
        self._event_type = Event
        self._summary_type = Summary
        self._write(file_version="brain.Event:2")
        if done:
            session_start = SessionLog(status=SessionLog.START)
            self._write(step=done + 1, session_log=session_start)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        scalars: list[object] = []
        for name, value in values.items():
            scalar = self._summary_type.Value(tag=name, simple_value=value)
            scalars.append(scalar)
        summary = self._summary_type(value=scalars)
        self._write(step=step, summary=summary)

    def _write(self, **content: object) -> None:
        event = self._event_type(wall_time=time.time(), **content)
        record = io.BytesIO()
        self._make_record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        self._file.close()


class WandbSink(Sink):
    """Writes a Weights & Biases run, with its files in the run folder and `parameters`
    as its config. Its own waits are bounded too: they also run when the interpreter
    exits."""

    def __init__(
        self, settings: WandbConfig, folder: Path, parameters: Mapping[str, object]
    ) -> None:
        import wandb

        options = wandb.Settings(
            console="off", silent=True, init_timeout=30.0, finish_timeout=20.0
        )
        self._run = wandb.init(
            project=settings.project,
            mode=settings.mode,
            name=folder.name,
            dir=str(folder),
            config=dict(parameters),
            settings=options,
        )
        self._run.define_metric(f"{_EVAL_PREFIX}*", step_metric=_EVAL_STEP)
        self._newest_step = 0
        self._make_table = wandb.Table
        address = self._run.dir
        if settings.mode == "online":
            address = self._run.url
        logger.info("wandb run: %s", address)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values. wandb drops rows of earlier steps, so that an evaluation
        which ends after a later step is logged in that one, with its own step as the
        axis of its metrics."""
        row = dict(values)
        if any(name.startswith(_EVAL_PREFIX) for name in values):
            row[_EVAL_STEP] = step
        self._newest_step = max(self._newest_step, step)
        self._run.log(row, step=self._newest_step)

    def rollouts(self, step: int, rows: Sequence[SampledRollout]) -> None:
        table = self._make_table(
            columns=list(SampledRollout._fields), data=[list(row) for row in rows]
        )
        self._run.log({"rollouts": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink(Sink):
    """Writes an MLflow run on the tracking server or store of the settings, in the
    experiment that MLflow's own environment variable names. Values that are not finite
    are left out."""

    def __init__(
        self, run: RunConfig, folder: Path, parameters: Mapping[str, object]
    ) -> None:
        import mlflow

        self._mlflow = mlflow  # the active run belongs to this thread
        mlflow.set_tracking_uri(run.metrics.mlflow_tracking_uri or "")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(parameters))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class ThreadedSink(Sink):
    """Opens, writes and closes another sink in its own thread. Only `close` waits for
    that thread, for at most `close_timeout_s`."""

    def __init__(
        self, name: str, open_sink: Callable[[], Sink], close_timeout_s: float = 30.0
    ) -> None:
        self._name = name
        self._open_sink = open_sink
        self._close_timeout_s = close_timeout_s
        self._calls: queue.SimpleQueue[Callable[[Sink], None] | None] = (
            queue.SimpleQueue()
        )
        """One call for each row of values, and each table. None: the end."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self._name

    def _work(self) -> None:
        try:
            with contextlib.closing(self._open_sink()) as sink:
                while (call := self._calls.get()) is not None:
                    call(sink)
        except Exception as error:
            self._error = error

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values. Raises the thread's error since the last step."""
        row = dict(values)
        self._put(lambda sink: sink.step(step, row))

    def rollouts(self, step: int, rows: Sequence[SampledRollout]) -> None:
        """Queue the rollouts. Raises as `step` does."""
        self._put(lambda sink: sink.rollouts(step, rows))

    def _put(self, call: Callable[[Sink], None]) -> None:
        if self._error is not None:
            raise self._error
        self._calls.put(call)

    def close(self) -> None:
        """Close the sink. Raises the thread's error, or DeadlineError if it hangs."""
        self._calls.put(None)
        self._thread.join(self._close_timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            waited_for = f"{self} to take its last {self._calls.qsize()} rows"
            raise DeadlineError(waited_for, self._close_timeout_s)


class RunObserver(Sink):
    """All sinks as one that never raises."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def phase(self, name: str, step: int) -> None:
        self._call_each(lambda sink: sink.phase(name, step))

    @property
    def shows_waits(self) -> bool:
        return any(sink.shows_waits for sink in self._sinks)

    def awaits(self, text: str) -> None:
        self._call_each(lambda sink: sink.awaits(text))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._call_each(lambda sink: sink.step(step, values))

    def rollouts(self, step: int, rows: Sequence[SampledRollout]) -> None:
        self._call_each(lambda sink: sink.rollouts(step, rows))

    def failures(self, failed: Mapping[str, int]) -> None:
        self._call_each(lambda sink: sink.failures(failed))

    def span(self, span: Span) -> None:
        self._call_each(lambda sink: sink.span(span))

    def sample(self, sample: Sample) -> None:
        self._call_each(lambda sink: sink.sample(sample))

    def note(self, text: str) -> None:
        """Print a message that stays on the screen. Control characters, from texts of
        models and exceptions, are shown as escapes."""
        with contextlib.suppress(
            OSError
        ):  # the terminal may be gone, or the pipe's reader
            print(printable(text), flush=True)

    def close(self) -> None:
        self._call_each(lambda sink: sink.close())
        self._sinks.clear()

    def _call_each(self, call: Callable[[Sink], None]) -> None:
        """Call each sink, and drop those that raise."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.exception("%s failed and is left out from now on", sink)
                reason, _, _ = str(error).strip().partition("\n")
                if not reason:
                    reason = type(error).__name__
                self.note(
                    f"warning: {sink} logs nothing from now on: {reason} (logs/driver.log has the rest)"
                )


def open_sinks(folder: RunFolder, config: Config, *, done: int = 0) -> list[Sink]:
    """Open the sinks of the settings, for a run that has made `done` steps."""
    run = config.run
    parameters: dict[str, object] = {}
    for table, entries in config.settings().items():
        for key, value in entries.items():
            parameters[f"{table}.{key}"] = value
    sinks: list[Sink] = [
        PhaseFile(folder.phase_path),
        JsonlSink(folder.metrics_path),
        TimelineSink(folder.path, done),
    ]
    trackers: list[partial[Sink]] = []
    if run.metrics.tensorboard:
        trackers.append(partial(TensorBoardSink, folder.tensorboard_path, done))
    if run.wandb is not None:
        trackers.append(partial(WandbSink, run.wandb, folder.path, parameters))
    if run.metrics.mlflow_tracking_uri:
        trackers.append(partial(MlflowSink, run, folder.path, parameters))
    sinks += [ThreadedSink(tracker.func.__name__, tracker) for tracker in trackers]
    return sinks
