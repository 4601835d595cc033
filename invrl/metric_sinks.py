"""Where a step's numbers go. Invariant: a failing sink is logged once and left out, and one that is slow or
hangs is not waited for; neither stops training. Called by the driver (`training.py`) with what
`metrics.resolve` makes. wandb and mlflow are imported only where a setting asks for them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from invrl.errors import ConfigError, DeadlineError

if TYPE_CHECKING:
    from invrl.config import Config, RunConfig

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
    """TensorBoard's event file, through its own record format: no torch, no tensorflow, no thread. Viewers
    forget earlier files' events of steps after `done`, which are lost."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        # protobuf makes these names at run time
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._event, self._summary = Event, Summary
        self._write(file_version="brain.Event:2")
        if done:
            self._write(step=done + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def _write(self, **content: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """A Weights & Biases run, its files in the run folder; `parameters` are its config. Its own waits are
    bounded too: they also run when the interpreter exits."""

    def __init__(self, run: RunConfig, folder: Path, parameters: Mapping[str, object]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, init_timeout=30.0, finish_timeout=20.0)
        self._run = wandb.init(
            project=run.wandb_project, mode=run.wandb_mode, name=folder.name, dir=str(folder),
            config=dict(parameters), settings=settings,
        )  # fmt: skip
        logger.info("wandb run: %s", self._run.url if run.wandb_mode == "online" else self._run.dir)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow run on the tracking server or store of the setting. What is not finite is left out."""

    def __init__(self, run: RunConfig, folder: Path, parameters: Mapping[str, object]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient(tracking_uri=run.mlflow_tracking_uri)
        known = self._client.get_experiment_by_name(run.mlflow_experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(run.mlflow_experiment)
        self._id = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(name, str(value)) for name, value in parameters.items()]
        for start in range(0, len(params), 100):  # MLflow takes no more in one call
            self._client.log_batch(self._id, params=params[start : start + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._client.log_batch(self._id, [self._metric(name, v, now, step) for name, v in finite.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class ThreadedSink:
    """A sink over a network, opened, written and closed in a thread of its own, which nobody waits for but
    `close`, for `close_s` seconds."""

    def __init__(self, name: str, opened: Callable[[], Sink], close_s: float = 30.0) -> None:
        self.name, self._opened, self._close_s = name, opened, close_s
        self._rows: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            with contextlib.closing(self._opened()) as sink:
                while (row := self._rows.get()) is not None:
                    sink.write(*row)
        except Exception as error:
            self._error = error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Raises what the thread met since."""
        if self._error is not None:
            raise self._error
        self._rows.put((step, dict(values)))

    def close(self) -> None:
        """Raises what the thread met, or DeadlineError if it hangs."""
        self._rows.put(None)
        self._thread.join(self._close_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise DeadlineError(f"{self.name} to take its last {self._rows.qsize()} rows", self._close_s)


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


def open_sinks(
    metrics_path: Path, tensorboard_path: Path | None, config: Config | None = None, *, done: int = 0
) -> SinkSet:
    """The run's sinks after `done` steps; one that cannot be opened is logged and left out. With `config`,
    those that its settings ask for too: they belong to the run folder, which holds `metrics_path`."""
    sinks: list[Sink] = [JsonlSink(metrics_path)]
    if tensorboard_path is not None:
        try:
            sinks.append(TensorBoardSink(tensorboard_path, done))
        except Exception:
            logger.exception("TensorBoard events are left out")
    if config is not None:
        run, folder, tables = config.run, metrics_path.parent, config.model_dump(mode="json")
        parameters = {f"{table}.{key}": value for table in tables for key, value in tables[table].items()}
        if run.wandb_project:
            sinks.append(ThreadedSink("WandbSink", lambda: WandbSink(run, folder, parameters)))
        if run.mlflow_tracking_uri:
            sinks.append(ThreadedSink("MlflowSink", lambda: MlflowSink(run, folder, parameters)))
    return SinkSet(sinks)


def check_trackers(run: RunConfig) -> None:
    """What the settings ask for is installed and has its key. Raises ConfigError."""
    if re.search(r"://[^/@]*:[^/@]+@", run.mlflow_tracking_uri):  # settings are written down
        fix = "leave it out; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
        raise ConfigError("run.mlflow_tracking_uri", "(not shown)", "it holds a password", fix)
    for field, package in (("wandb_project", "wandb"), ("mlflow_tracking_uri", "mlflow")):
        spec = importlib.util.find_spec(package) if (value := getattr(run, field)) else None
        if value and (spec is None or spec.origin is None):  # no origin: a folder of that name, no package
            reason, fix = f"the package {package} is not installed", f"pip install {package}"
            raise ConfigError(f"run.{field}", value, reason, fix)
    if run.wandb_project and run.wandb_mode == "online":
        import wandb

        has_key = True
        try:
            has_key = wandb.login(prompt=False)
        except Exception as error:  # no network, or the key is refused: the sink will meet it too
            logger.warning("Weights & Biases: %s", error)
        if not has_key:
            reason = "there is no API key for Weights & Biases"
            fix = "set WANDB_API_KEY, run `wandb login`, or give --wandb-mode offline"
            raise ConfigError("run.wandb_mode", run.wandb_mode, reason, fix)


def _name(sink: Sink) -> str:
    return sink.name if isinstance(sink, ThreadedSink) else type(sink).__name__
