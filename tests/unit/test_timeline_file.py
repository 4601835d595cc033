"""The timeline of a run: what killed, resumed and long runs leave behind, and what a
reader makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invrl.observe.sinks.phases import observed_phase
from invrl.observe.sinks.sinks import RunObserver, Sink, TimelineSink
from invrl.store.timeline_file import (
    EARLIER_NAME,
    TIMELINE_NAME,
    EngineSample,
    GatewaySample,
    IncarnationStart,
    Sample,
    Span,
    Timeline,
    TimelineWriter,
    read_timeline,
)
from invrl.types.metrics import timed

START = IncarnationStart(time=1.5, pid=7, step=0, restart=False)
SPAN = Span(
    lane="trainer",
    name="train",
    step=3,
    start=2.0,
    end=2.75,
    waits_for="trainer",
    parts={"optimizer": 0.25},
)
SAMPLE = Sample(
    time=3.0,
    engines=(
        EngineSample(
            name="engine-0", running=4, waiting=1, kv_use=0.5, cache_hit_rate=0.25
        ),
    ),
    gateway=GatewaySample(
        requests=2, latency_p50_s=0.5, latency_p95_s=1.5, loop_lag_s=0.001
    ),
    memory={"driver": 2**30},
)


def write(
    run: Path, *entries: IncarnationStart | Span | Sample, max_bytes: int = 2**20
) -> None:
    writer = TimelineWriter(run, max_bytes=max_bytes)
    for entry in entries:
        writer.write(entry)
    writer.close()


def test_written_timeline_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, START, SPAN, SAMPLE)
    assert read_timeline(tmp_path) == Timeline(
        starts=(START,), spans=(SPAN,), samples=(SAMPLE,)
    )


def test_run_without_a_timeline_file_has_an_empty_timeline(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == Timeline()


def test_half_line_of_a_killed_run_loses_only_itself(tmp_path: Path) -> None:
    write(tmp_path, START, SPAN)
    path = tmp_path / TIMELINE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    assert read_timeline(tmp_path) == Timeline(starts=(START,))
    write(tmp_path, SPAN)  # the run goes on
    assert read_timeline(tmp_path) == Timeline(starts=(START,), spans=(SPAN,))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[]",
        b"7",
        b"null",
        b'{"kind": "later"}',
        b'{"kind": ["span"]}',
        b'{"kind": "span"}',
        b'{"kind": "sample", "time": "now"}',
        b'{"kind": "span", "lane": 1}',
    ],
)
def test_timeline_line_that_is_not_an_entry_is_left_out(
    line: bytes, tmp_path: Path
) -> None:
    (tmp_path / TIMELINE_NAME).write_bytes(line + b"\n")
    write(tmp_path, SPAN)
    assert read_timeline(tmp_path) == Timeline(spans=(SPAN,))


def test_timeline_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, SPAN)
    path = tmp_path / TIMELINE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}) + "\n")
    assert read_timeline(tmp_path).spans == (SPAN,)


def test_two_timeline_files_hold_the_newest_entries_of_a_long_run(
    tmp_path: Path,
) -> None:
    line_bytes = 100
    spans = [
        Span(lane="driver", name="rollout", step=step, start=step, end=step + 0.5)
        for step in range(200)
    ]
    write(tmp_path, *spans, max_bytes=20 * line_bytes)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        EARLIER_NAME,
        TIMELINE_NAME,
    ]
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 22 * line_bytes
    steps = [span.step for span in read_timeline(tmp_path).spans]
    assert steps == list(range(steps[0], 200))
    assert len(steps) >= 15


def test_driver_records_its_start_and_its_phases(tmp_path: Path) -> None:
    for done in (0, 4):
        observer = RunObserver([TimelineSink(tmp_path, done)])
        seconds: dict[str, float] = {}
        with (
            observed_phase(observer, "train", done + 1) as parts,
            timed(seconds, "train"),
        ):
            parts["optimizer"] = 0.5
        with pytest.raises(KeyError), observed_phase(observer, "assemble", done + 1):
            raise KeyError
        observer.close()
    timeline = read_timeline(tmp_path)
    assert [(start.step, start.restart) for start in timeline.starts] == [
        (0, False),
        (4, True),
    ]
    train, assemble, *_ = timeline.spans
    assert train.lane == "trainer"
    assert train.step == 1
    assert train.waits_for == "trainer"
    assert dict(train.parts) == {"optimizer": 0.5}
    assert assemble.lane == "driver"
    assert assemble.waits_for == ""
    assert all(span.start <= span.end for span in timeline.spans)
    assert len(timeline.spans) == 4


def test_a_timeline_that_cannot_be_written_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(Sink):
        def span(self, span: Span) -> None:
            raise OSError("no space left on device")

    observer = RunObserver([Full()])
    for _ in range(2):
        with observed_phase(observer, "train", 1):
            pass
    assert capsys.readouterr().out.count("no space left") == 1
