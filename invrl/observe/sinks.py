"""Where phases and a step's numbers go. Invariant: a sink that fails is told once and left out, and one
that is slow or hangs is not waited for; neither stops training. wandb and mlflow are imported only
where a setting asks for them."""

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
from typing import TYPE_CHECKING

from invrl.errors import ConfigError, DeadlineError
from invrl.host.disk import write_atomically
from invrl.host.printable import for_stdout
from invrl.store.run_folder import RunFolder

if TYPE_CHECKING:
    from invrl.run.config import Config, RunConfig

logger = logging.getLogger(__name__)


class Sink:
    """One destination; may raise, `RunObserver` does not."""

    def phase(self, name: str, step: int) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def failures(self, failed: Mapping[str, int]) -> None:
        """Rollouts that have failed since the start of the run, by reason."""

    def close(self) -> None: ...

    def __str__(self) -> str:
        return type(self).__name__


class PhaseFile(Sink):
    """What goes on now, for who looks from outside: pid, step and phase as JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def phase(self, name: str, step: int) -> None:
        write_atomically(self._path, json.dumps({"pid": os.getpid(), "step": step, "phase": name}))


class JsonlSink(Sink):
    """`metrics.jsonl`: one object per step with `step` and `time` (Unix seconds), flushed at once, so that
    a dead run keeps every step. What is not finite is null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink(Sink):
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

    def step(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=scalars))

    def _write(self, **content: object) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbSink(Sink):
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

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink(Sink):
    """An MLflow run on the tracking server or store of the setting, in the experiment that MLflow's own
    environment variable names. What is not finite is left out."""

    def __init__(self, run: RunConfig, folder: Path, parameters: Mapping[str, object]) -> None:
        import mlflow

        self._mlflow = mlflow  # the active run is that of this thread
        mlflow.set_tracking_uri(run.mlflow_tracking_uri)
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(parameters))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name: v for name, v in values.items() if math.isfinite(v)}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class ThreadedSink(Sink):
    """A sink that is opened, written and closed in a thread of its own, which nobody waits for but `close`,
    for `close_s` seconds."""

    def __init__(self, name: str, opened: Callable[[], Sink], close_s: float = 30.0) -> None:
        self._name, self._opened, self._close_s = name, opened, close_s
        self._rows: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self._name

    def _work(self) -> None:
        try:
            with contextlib.closing(self._opened()) as sink:
                while (row := self._rows.get()) is not None:
                    sink.step(*row)
        except Exception as error:
            self._error = error

    def step(self, step: int, values: Mapping[str, float]) -> None:
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
            raise DeadlineError(f"{self} to take its last {self._rows.qsize()} rows", self._close_s)


class RunObserver(Sink):
    """All sinks as one that never raises. Step 0 is before the first."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def phase(self, name: str, step: int) -> None:
        self._each(lambda sink: sink.phase(name, step))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step is done; step 0 may carry the evaluation before training."""
        self._each(lambda sink: sink.step(step, values))

    def failures(self, failed: Mapping[str, int]) -> None:
        self._each(lambda sink: sink.failures(failed))

    def note(self, text: str) -> None:
        """A line that stays on the screen: where the run folder is, an evaluation's result. What models and
        exceptions say may be in it, so control characters are shown as escapes."""
        with contextlib.suppress(OSError):  # the terminal may be gone, or the pipe's reader
            print(for_stdout(text), flush=True)

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, tell: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                tell(sink)
            except Exception as error:
                self._sinks.remove(sink)
                logger.exception("%s failed and is left out from now on", sink)
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self.note(
                    f"warning: {sink} logs nothing from now on: {reason} (logs/driver.log has the rest)"
                )


def open_sinks(folder: RunFolder, config: Config, *, done: int = 0) -> list[Sink]:
    """Those that the settings ask for, after `done` steps."""
    run, path, tables = config.run, folder.path, config.model_dump(mode="json")
    parameters = {f"{table}.{key}": value for table in tables for key, value in tables[table].items()}
    sinks: list[Sink] = [PhaseFile(folder.phase_path), JsonlSink(folder.metrics_path)]
    if run.tensorboard:
        sinks.append(ThreadedSink("TensorBoardSink", lambda: TensorBoardSink(folder.tensorboard_path, done)))
    if run.wandb_project:
        sinks.append(ThreadedSink("WandbSink", lambda: WandbSink(run, path, parameters)))
    if run.mlflow_tracking_uri:
        sinks.append(ThreadedSink("MlflowSink", lambda: MlflowSink(run, path, parameters)))
    return sinks


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
    if run.mlflow_tracking_uri:
        _check_mlflow(run.mlflow_tracking_uri)
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


def _check_mlflow(uri: str) -> None:
    """MLflow can log there, as far as can be known without asking a server. It takes anything for a folder
    and fails when it is first written to: folders it does not write to any more, and mlflow-skinny has no
    database. Raises ConfigError."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        MlflowClient(tracking_uri=uri)
    except (MlflowException, ImportError) as error:
        reason = f"MLflow would log nothing there: {str(error).strip().partition('. ')[0]}"
        fix = (
            "give the http:// address of a tracking server (`mlflow server`, of the package mlflow); or "
            "sqlite:///FILE, which needs the package mlflow too (mlflow-skinny has no databases); or set "
            "MLFLOW_ALLOW_FILE_STORE=true for a folder"
        )
        raise ConfigError("run.mlflow_tracking_uri", uri, reason, fix) from error
