"""The HTML report: what it says of a run's folder, and that hostile texts stay
texts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_report import HOSTILE_CONTENTS

from invrl.cli import main as cli
from invrl.observe.report_chart import Chart, Line, svg
from invrl.observe.report_page import page
from invrl.observe.samples import Sample
from invrl.reasons import FailureReason
from invrl.run.config import Source, resolve
from invrl.run.report_contents import (
    _changed_settings,
    _failures,
    _gains,
    read_contents,
)
from invrl.store.run_folder import RunFolder
from invrl.types import RolloutIdentity


class Elements(HTMLParser):
    """Every element with its attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_texts_create_no_elements_or_attributes() -> None:
    elements = Elements(page(HOSTILE_CONTENTS))
    tags = [tag for tag, _ in elements.found]
    assert not {"script", "link", "img", "b", "iframe", "a"} & set(tags)
    assert tags.count("style") == 1
    assert tags.count("body") == 1
    names = {name for _, attributes in elements.found for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not {"id", "src", "href", "style"} & names
    assert elements.text.count("document.title='taken'") > 20  # it is shown as text
    assert "\x1b" not in elements.text
    assert "a\\x1b[2J\\u202eb" in elements.text


def test_content_policy_allows_only_the_style_sheet() -> None:
    elements = Elements(page(HOSTILE_CONTENTS))
    [policy] = [
        attributes["content"]
        for tag, attributes in elements.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(
        r"https?://", page(HOSTILE_CONTENTS).replace("http://elsewhere.test", "")
    )


def test_gain_is_shown_with_both_intervals() -> None:
    text = page(HOSTILE_CONTENTS)
    assert "0.750 [0.625, 0.875] (step 5)" in text
    assert "+0.500 [+0.375, +0.625]" in text


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 0.75], ["0", "0.5", "1"]),
        ([0.0, 0.0], ["0", "0.5", "1"]),
        ([-2.0, -2.0], ["-4", "-2", "0"]),
        ([10.0, 30.0], ["10", "20", "30"]),
        ([float("nan"), 30.0], ["0", "30", "60"]),
    ],
)
def test_chart_axis_shows_lowest_and_highest_value(
    values: list[float], labels: list[str]
) -> None:
    picture = svg(
        Chart(title="t", lines=[Line(label="l", steps=[1, 9], values=values)])
    )
    assert re.findall(r'text-anchor="end">([^<]*)<', picture)[:3] == labels
    assert "nan" not in picture
    numbers = [
        float(number) for number in re.findall(r'(?:cx|cy)="([-0-9.]+)"', picture)
    ]
    assert all(0.0 <= number <= 440.0 for number in numbers)


def test_a_chart_without_a_finite_value_is_left_out() -> None:
    assert (
        svg(Chart(title="t", lines=[Line(label="l", steps=[1], values=[float("inf")])]))
        == ""
    )
    assert svg(Chart(title="t", lines=[])) == ""


# ---------------------------------------------------------------- from a run's folder


def sample(
    number: int, *, reward: float | None = None, step: int = 0, failure: str = ""
) -> Sample:
    identity = RolloutIdentity(
        session_id=f"s{number}",
        task_id=f"task-{number}",
        group_id=f"g{number}",
        index=0,
        attempt=0,
    )
    return Sample(
        identity=identity,
        purpose="train" if failure else "eval",
        step=step,
        evaluation="greedy",
        state="",
        reward=reward,
        failure=FailureReason.TIMEOUT if failure else None,
        detail=failure,
        opened_at=0.0,
    )


def test_a_gain_is_paired_over_the_same_tasks() -> None:
    rows = [
        {"step": 0, "eval/greedy/accuracy": 0.0},
        {
            "step": 4,
            "eval/greedy/accuracy": 1.0,
            "eval/greedy/accuracy_low": 0.8,
            "eval/greedy/accuracy_high": 1.0,
        },
    ]
    before = [sample(number, reward=0.0) for number in range(8)]
    after = [sample(number, reward=1.0, step=4) for number in range(8)]
    [gain] = _gains(rows, [*before, *after])
    assert gain.gain_interval == (1.0, 1.0)
    assert gain.num_tasks == 8
    assert gain.after_interval == (0.8, 1.0)
    [gain] = _gains(rows, [*before[1:], *after])
    assert gain.gain_interval is None  # other tasks before: nothing to pair
    [gain] = _gains(rows[:1], before)
    assert gain.first_step == 0
    assert gain.last_step == 0
    assert gain.gain_interval is None


def test_failures_are_shown_by_reason_with_the_most_frequent_messages() -> None:
    details = ["a\nboom"] * 3 + ["crash"] * 2 + ["x", "y"]
    [failed] = _failures(
        [sample(number, failure=detail) for number, detail in enumerate(details)]
    )
    assert failed.reason == "timeout"
    assert failed.count == 7
    assert [(example.count, example.detail) for example in failed.examples] == [
        (3, "a\nboom"),
        (2, "crash"),
        (1, "x"),
    ]
    assert failed.examples[0].task_id == "task-2"  # the newest


def test_changed_settings_are_shown_with_their_default() -> None:
    config = resolve(
        Source(
            name="test",
            tables={
                "run": {"num_steps": 7},
                "train": {"lr": 1e-3},
            },
        )
    )
    changed = {row.name: (row.value, row.default) for row in _changed_settings(config)}
    assert changed == {"run.num_steps": ("7", "100"), "train.lr": ("0.001", "1e-06")}


def report_of(folder: Path) -> str:
    assert cli.main(["report", str(folder)]) == 0
    return (folder / "report" / "report.html").read_text()


def test_report_page_of_a_run_that_failed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.resolved.toml").write_text("[run]\nnum_steps = 7\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").write_bytes(
        b"no GPU\xff <script>alert(1)</script>\n"
    )
    text = report_of(tmp_path)
    for part in (
        "stopped before its end, after 0 of 7 steps",
        "no GPU",
        "run.num_steps",
        "made no step",
    ):
        assert part in text
    assert "<script" not in text
    assert capsys.readouterr().out == f"{tmp_path}/report/report.html\n"
    assert not (tmp_path / "report" / "reward.png").exists()


def test_report_page_of_a_run_on_files_and_of_a_run_without_evaluations(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.resolved.toml").write_text(
        '[algorithm]\nobjective = "sft"\n[data]\ndata_path = "d"\n'
    )
    (tmp_path / "finished").write_text("2")
    rows = [
        {"step": step, "train/loss": 3.0 - step, "eval/loss": 2.0} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, rows)) + '\n{"step": 3, "tr'
    )
    text = report_of(tmp_path)
    assert "train/loss 2 → 1" in text
    assert "Held-out tasks" not in text
    rows = [{"step": 1, "rollout/reward_mean": 0.5, "time/step_s": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "mean 0.5" in report_of(tmp_path)
    assert (tmp_path / "report" / "reward.png").exists()


def test_damaged_store_and_settings_of_another_version_become_notes(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.resolved.toml").write_text("[run]\nno_such_setting = 1\n")
    (tmp_path / "run.sqlite").write_bytes(b"no database" * 100)
    text = report_of(tmp_path)
    assert "rollouts cannot be read" in text
    assert "settings cannot be shown" in text


def test_report_contents_are_read_without_a_configuration(tmp_path: Path) -> None:
    contents = read_contents(RunFolder(path=tmp_path), None, [])
    assert contents.settings == []
    assert contents.gains == []
    assert contents.failures == []
