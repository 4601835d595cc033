"""Sinks and the display: what they write, and that they never stop a run."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from checks_by_name import run_check
from recorded_run import record_run
from rich.console import Console

from invrl.errors import ConfigError
from invrl.observe.samples.console_samples import sample_rollouts
from invrl.observe.samples.sampled_rollout import SampledRollout
from invrl.observe.screen.live_progress import LiveProgress
from invrl.observe.screen.progress import PlainProgress, open_progress
from invrl.observe.sinks.sinks import (
    JsonlSink,
    PhaseFile,
    RunObserver,
    Sink,
    TensorBoardSink,
    ThreadedSink,
    open_sinks,
)
from invrl.observe.sinks.tracker_checks import check_trackers
from invrl.run.settings.config import Config, Source, resolve
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightVersion

ROOT = Path(__file__).parents[2]


class Failing(Sink):
    def __init__(self) -> None:
        self.writes = 0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.writes += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def test_jsonl_sink_writes_each_step_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.step(1, {"a": 0.5, "bad": math.inf, "worse": math.nan})
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert row["step"] == 1
    assert row["a"] == 0.5
    assert row["bad"] is None
    assert row["worse"] is None
    sink.close()
    JsonlSink(tmp_path / "m.jsonl").step(2, {"a": 1.0})
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_tensorboard_reads_back_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.step(step, {"rollout/reward_mean": step / 2})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("rollout/reward_mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 1.0)]


def test_tensorboard_sink_imports_neither_tensorflow_nor_torch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from invrl.observe.sinks.sinks import TensorBoardSink
TensorBoardSink(Path(sys.argv[1])).step(1, {"a": 1.0})
print(sorted({m.split(".")[0] for m in sys.modules} & {"tensorflow", "torch"}))
"""
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "[]", process.stderr


def test_failing_sink_is_logged_once_and_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    good = JsonlSink(tmp_path / "m.jsonl")
    sinks = RunObserver([failing, good])
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            sinks.step(step, {"a": 1.0})
    assert failing.writes == 1
    assert sum("Failing" in record.message for record in caplog.records) == 1
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3
    sinks.close()


def opened(folder: Path, config: Config) -> RunObserver:
    return RunObserver(open_sinks(RunFolder(path=folder), config))


def test_sink_that_cannot_open_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    sinks = opened(tmp_path, resolve())
    sinks.step(1, {"a": 1.0})
    sinks.close()
    assert (tmp_path / "metrics.jsonl").read_text()


# --------------------------------------------------------------- sinks over a network


class Collecting(Sink):
    """Takes rows once `go` is set; `at` says which call raises."""

    def __init__(self, at: str = "") -> None:
        self.at = at
        self.rows = []
        self.closed = False
        self.go = threading.Event()
        self.busy = threading.Event()

    def opened(self) -> Collecting:
        self._meet("open")
        return self

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.busy.set()
        self.go.wait()
        self._meet("write")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True
        self._meet("close")

    def _meet(self, call: str) -> None:
        if call == self.at:
            raise OSError(f"no network at {call}")


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.ERROR):
        # asyncio's are of what an earlier test left to the garbage collector
        yield lambda: [
            f"{record.message} {record.exc_text or ''}"
            for record in caplog.records
            if record.name != "asyncio"
        ]


def test_a_threaded_sink_gets_every_row_in_order(
    errors: Callable[[], list[str]],
) -> None:
    inner = Collecting()
    sinks = RunObserver([ThreadedSink("Collecting", inner.opened)])
    row = {"a": 1.0}
    sinks.step(1, row)
    row["a"] = 2.0  # the caller may reuse it
    sinks.step(2, row)
    inner.go.set()
    sinks.close()
    assert inner.rows == [
        (1, {"a": 1.0}),
        (2, {"a": 2.0}),
    ]
    assert inner.closed is True
    assert errors() == []


@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_a_threaded_sink_that_fails_is_logged_once_by_name(
    at: str, errors: Callable[[], list[str]]
) -> None:
    inner = Collecting(at)
    inner.go.set()
    threaded = ThreadedSink("Collecting", inner.opened)
    sinks = RunObserver([threaded])
    for step in range(3):
        sinks.step(step, {"a": 1.0})
        if at != "close":
            threaded._thread.join()
    sinks.close()
    assert inner.closed == (at != "open")
    (message,) = errors()
    assert "Collecting failed" in message
    assert f"no network at {at}" in message


def test_hung_sink_does_not_hold_up_the_run(errors: Callable[[], list[str]]) -> None:
    inner = Collecting()
    sinks = RunObserver(
        [ThreadedSink("Collecting", inner.opened, close_timeout_s=0.05)]
    )
    sinks.step(0, {})
    inner.busy.wait()  # row 0 is being written, without end
    for step in range(1, 3):
        sinks.step(step, {})
    sinks.close()
    (hung,) = errors()
    assert "Collecting failed" in hung
    assert "for Collecting to take its last 3 rows" in hung  # with row 0
    inner.go.set()


def test_hung_sink_does_not_hold_up_the_end_of_the_process() -> None:
    code = """
import threading
from invrl.observe.sinks.sinks import RunObserver, ThreadedSink
sinks = RunObserver([ThreadedSink("Hanging", threading.Event().wait, close_timeout_s=0.05)])
sinks.step(1, {"a": 1.0})
sinks.close()
print("closed")
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    warning = "warning: Hanging logs nothing from now on: waited 0.1 s for Hanging to take its last 2 rows"
    assert process.returncode == 0, process.stderr
    first, last = process.stdout.splitlines()
    assert first.startswith(warning)
    assert last == "closed"
    assert "Hanging" in process.stderr


def configured(**run: str | dict[str, str | int]) -> Config:
    return resolve(
        Source(name="test", tables={"run": run, "rollout": {"temperature": 0.75}})
    )


def test_wandb_writes_a_run_that_reads_back(
    tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    """The real package, offline: its file holds the numbers by step, and the
    configuration."""
    config = configured(wandb={"project": "p", "mode": "offline"})
    check_trackers(config.run)
    sinks = opened(tmp_path, config)
    sinks.step(0, {"eval/accuracy": 0.25})
    sinks.step(1, {"rollout/reward_mean": 0.5, "train/loss": math.nan})
    sinks.step(2, {"rollout/reward_mean": 0.6})
    sinks.step(1, {"eval/accuracy": 0.75})  # it ended during step 3
    sinks.close()
    assert errors() == []
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 240.0
    # wandb's own process writes on after `finish` returned
    while len((read := read_wandb(path))[0]) < 3:
        assert time.monotonic() < deadline, f"3 rows in {path}; there are: {read[0]}"
        time.sleep(0.05)
    history, settings = read
    assert [row.get("rollout/reward_mean") for row in history if row["_step"] == 1] == [
        0.5
    ]
    evaluations = {
        row["eval/step"]: row["eval/accuracy"] for row in history if "eval/step" in row
    }
    assert evaluations == {0: 0.25, 1: 0.75}
    assert settings["rollout.temperature"] == 0.75


def test_wandb_gets_a_table_of_rollouts_that_reads_back(
    tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    run = record_run(tmp_path)
    name = run.add(
        "7*6 \x00<b>",
        ["a \x1b\x00 <script>", "42" + "!" * 50_000],
        0.5,
        ending="length",
    )
    stored = RunStore(run.folder.store_path).closed_session(name)
    assert stored is not None
    assert isinstance(stored.outcome, RolloutSummary)
    group = Group(id="g", task_id="7*6", rollouts_G=(stored.outcome,))
    batch = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rows = sample_rollouts(run.folder.store_path, 3, 4, batch)
    config = configured(wandb={"project": "p", "mode": "offline", "rollouts": 3})
    check_trackers(config.run)
    (tmp_path / "logged").mkdir()
    sinks = opened(tmp_path / "logged", config)
    sinks.step(4, {"rollout/reward_mean": 0.5})
    sinks.rollouts(4, rows)
    sinks.close()
    assert errors() == []
    deadline = time.monotonic() + 240.0
    while not (
        tables := list(
            tmp_path.glob("logged/wandb/offline-run-*/files/media/table/*.table.json")
        )
    ):
        assert time.monotonic() < deadline, "no table was written"
        time.sleep(0.05)
    table = json.loads(tables[0].read_text())
    assert table["columns"] == list(SampledRollout._fields)
    [cells] = table["data"]
    row = dict(zip(table["columns"], cells, strict=True))
    assert row["step"] == 4
    assert row["reward"] == 0.5
    assert row["reason"] == "cut"
    assert row["version"] == 0
    assert row["task"] == "7*6 \x00<b>"
    assert row["length"] == stored.outcome.sampled_tokens
    assert row["response"].startswith("a \x1b\x00 <script>\n\n42!!!")
    assert "[... 30," in row["response"]  # characters are left out
    assert len(row["response"]) < 20_100
    (path,) = tmp_path.glob("logged/wandb/offline-run-*/*.wandb")
    history: list[dict] = []
    while not any("rollouts" in key for row in history for key in row):
        assert time.monotonic() < deadline, f"no row with the table in {path}"
        time.sleep(0.05)
        history, _ = read_wandb(path)
    assert {row["_step"] for row in history} == {4}


def test_a_table_of_rollouts_needs_wandb_and_a_number() -> None:
    with pytest.raises(ConfigError) as caught:
        configured(wandb={"rollouts": 3})
    assert caught.value.field == "wandb.project"
    assert caught.value.fix.startswith("give wandb.project too")
    for count in (-1, 1001):
        with pytest.raises(ConfigError) as caught:
            configured(wandb={"project": "p", "rollouts": count})
        assert caught.value.field == "wandb.rollouts"
    tables = {
        "run": {"wandb": {"project": "p", "rollouts": 3}},
        "algorithm": {"objective": "sft"},
        "data": {"data_path": "rows.jsonl"},
    }
    with pytest.raises(ConfigError, match="there are no rollouts"):
        resolve(Source(name="test", tables=tables))


def read_wandb(path: Path) -> tuple[list[dict], dict]:
    """History rows and configuration of a run file: LevelDB's log format after a header
    of 7 bytes. Each chunk is crc, length, kind and data; kinds 1 and 4 end a record;
    blocks of 32 KiB are padded."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    parts = b""
    history: list[dict] = []
    settings: dict = {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if len(data) < at + 7 + length:
            break  # it is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):
            continue
        record, parts = Record.FromString(parts), b""
        settings.update(
            {item.key: json.loads(item.value_json) for item in record.run.config.update}
        )
        if items := record.history.item:
            history.append(
                {
                    i.key or "/".join(i.nested_key): json.loads(i.value_json)
                    for i in items
                }
            )
    return history, settings


def test_mlflow_reads_back_values_steps_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Callable[[], list[str]]
) -> None:
    from mlflow.tracking import MlflowClient

    # the store that needs no database package
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "e")
    config = configured(metrics={"mlflow_tracking_uri": (tmp_path / "store").as_uri()})
    check_trackers(config.run)
    (tmp_path / "run-7").mkdir()
    for reward in (0.5, 0.75):  # the experiment is there for the second run
        sinks = opened(tmp_path / "run-7", config)
        for step in (1, 2):
            sinks.step(
                step, {"rollout/reward_mean": reward * step, "train/loss": math.nan}
            )
        sinks.close()
    assert errors() == []
    client = MlflowClient(config.run.metrics.mlflow_tracking_uri)
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None
    runs = client.search_runs(
        [experiment.experiment_id], order_by=["attributes.start_time"]
    )
    assert [run.info.run_name for run in runs] == ["run-7", "run-7"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    rewards = [
        client.get_metric_history(run.info.run_id, "rollout/reward_mean")
        for run in runs
    ]
    assert sorted([(m.step, m.value) for m in history] for history in rewards) == [
        [(1, 0.5), (2, 1.0)],
        [(1, 0.75), (2, 1.5)],
    ]
    assert runs[0].data.params["rollout.temperature"] == "0.75"
    assert len(runs[0].data.params) == sum(
        len(table) for table in config.settings().values()
    )


@pytest.mark.parametrize(
    ("package", "run"),
    [
        ("wandb", {"wandb": SimpleNamespace(project="p", mode="offline")}),
        ("mlflow", {"mlflow_tracking_uri": "http://localhost:1"}),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_fix(
    package: str, run: dict[str, str], tmp_path: Path
) -> None:
    """Also where the working directory holds a folder of that name, as earlier runs
    leave it."""
    (tmp_path / package).mkdir()
    code = f"""
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{str(tmp_path)!r}]
from types import SimpleNamespace
from invrl.observe.sinks.tracker_checks import check_trackers
def run_settings(wandb=None, mlflow_tracking_uri=None):
    metrics = SimpleNamespace(mlflow_tracking_uri=mlflow_tracking_uri)
    return SimpleNamespace(wandb=wandb, metrics=metrics)
namespace = SimpleNamespace
check_trackers(run_settings(**{run}))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert last.startswith(
        ("invrl.errors.ConfigError: metrics.", "invrl.errors.ConfigError: wandb.")
    )
    assert f"the package {package} is not installed" in last
    assert f"pip install {package}" in last


def test_trackers_without_a_key_or_with_a_password_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/no/such/netrc")
    with pytest.raises(ConfigError, match="no API key") as caught:
        check_trackers(configured(wandb={"project": "p"}).run)
    assert "WANDB_API_KEY" in caught.value.fix
    with pytest.raises(ConfigError, match="holds a password") as caught:
        check_trackers(
            configured(metrics={"mlflow_tracking_uri": "https://me:s3cret@host/x"}).run
        )
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["some/path", "file:///some/path", "sqlite:///mlflow.db"]
)
def test_mlflow_store_that_would_log_nothing_is_refused_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str
) -> None:
    """The package in use is mlflow-skinny, without the packages of databases."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="MLflow would log nothing there") as caught:
        check_trackers(configured(metrics={"mlflow_tracking_uri": uri}).run)
    assert caught.value.value == uri
    assert "http://" in caught.value.fix
    assert "MLFLOW_ALLOW_FILE_STORE=true" in caught.value.fix
    assert list(tmp_path.iterdir()) == []
    check_trackers(
        configured(metrics={"mlflow_tracking_uri": "http://127.0.0.1:1"}).run
    )


def test_failing_sink_is_reported_on_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Full(Sink):
        def step(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no space left\nmore")

    observer = RunObserver([Full()])
    observer.step(1, {})
    observer.step(2, {})
    warning = "warning: Full logs nothing from now on: no space left (logs/driver.log has the rest)\n"
    assert capsys.readouterr().out == warning


def test_trackers_are_checked_before_a_run_starts() -> None:
    tables = {
        "metrics": {"mlflow_tracking_uri": "https://me:s3cret@host"},
        "rollout": {
            "rollout_function_path": "rollout_fns.calculator:rollout",
            "task_source_path": "rollout_fns.calculator:task_source",
        },
    }
    with pytest.raises(ConfigError, match="holds a password"):
        run_check("trackers", resolve(Source(name="test", tables=tables)))


def test_plain_progress_is_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress = open_progress("auto", 5)
    assert isinstance(progress, PlainProgress)
    progress.phase("starting engines", 0)
    progress.phase("rollout", 1)
    progress.step(1, {"rollout/reward_mean": 0.25, "train/loss": 1.0})
    progress.step(5, {"eval/greedy/accuracy": 0.75})
    lines = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "starting engines",
        "step 1/5: reward 0.25",
        "step 5/5: eval/greedy/accuracy 0.75",
    ]


def test_live_progress_shows_phase_step_and_reward() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = LiveProgress(5, console)
    progress.step(2, {"rollout/reward_mean": 0.25, "time/rollout_tokens_per_s": 123.0})
    progress.phase("train", 3)
    with console.capture() as drawn:
        console.print(progress.render())
    progress.close()
    for part in ("step 3/5", "train", "reward", "0.25", "123"):
        assert part in drawn.get()


def test_notes_scroll_above_the_live_display(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = io.StringIO()
    observer = RunObserver(
        [LiveProgress(5, Console(file=drawn, force_terminal=True, width=100))]
    )
    observer.note("model: runs/a/[b]/c")
    observer.close()
    observer.note("after it")
    assert "model: runs/a/[b]/c\n" in drawn.getvalue()
    assert capsys.readouterr().out == "after it\n"


def test_no_progress_still_prints_notes(capsys: pytest.CaptureFixture[str]) -> None:
    observer = RunObserver([open_progress("none", 5)])
    observer.step(1, {"rollout/reward_mean": 1.0})
    observer.note("run folder: x")
    assert capsys.readouterr().out == "run folder: x\n"


def test_current_phase_is_visible_to_other_threads(tmp_path: Path) -> None:
    before = time.time()
    RunObserver([PhaseFile(tmp_path / "phase.json")]).phase("sync", 3)
    content = json.loads((tmp_path / "phase.json").read_text())
    assert before - 0.001 <= content.pop("since") <= time.time() + 0.001
    assert content == {"pid": os.getpid(), "step": 3, "phase": "sync"}


def test_note_with_control_characters_moves_no_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RunObserver([]).note(
        "the first failure: \x1b[2J\x1b]0;title\x07 \ud800\n  of user code"
    )
    assert capsys.readouterr().out == (
        "the first failure: \\x1b[2J\\x1b]0;title\\x07 \\ud800\n  of user code\n"
    )


def test_note_to_a_closed_terminal_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", gone)
    RunObserver([]).note("held-out")
