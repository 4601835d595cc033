"""The report, from metrics.jsonl alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import tomli_w
from matplotlib.figure import Figure
from matplotlib.text import Text
from stored_rollouts import taken_batch

from invrl.errors import ConfigError
from invrl.observe.report import (
    Titles,
    curve,
    eval_names,
    figure_of,
    has_curve,
    reward_band,
    titles,
    trainer_memory,
    write_report,
)
from invrl.observe.sinks import JsonlSink
from invrl.observe.step_metrics import rollout_metrics
from invrl.store.metrics_file import MetricsRow, read_metrics


def dead_run(folder: Path) -> Path:
    """What a killed run leaves: steps, an evaluation before training, and half a
    line."""
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.step(
        0,
        {
            f"eval/{mode}/accuracy{part}": 0.25
            for mode in ("greedy", "sampled")
            for part in ("", "_low", "_high")
        },
    )
    for step in (1, 2, 3):
        sink.step(step, {"rollout/reward_mean": step / 4, "rollout/reward_std": 0.1})
    sink.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/rew')
    return folder


def test_report_of_a_dead_run_is_drawn(tmp_path: Path) -> None:
    picture = write_report(dead_run(tmp_path))
    assert picture == tmp_path / "report" / "reward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5_000


def test_report_curves_hold_the_measured_values(tmp_path: Path) -> None:
    rows = read_metrics(dead_run(tmp_path) / "metrics.jsonl")
    assert curve(rows, "rollout/reward_mean") == ([1, 2, 3], [0.25, 0.5, 0.75])
    assert eval_names(rows) == ["eval/greedy/accuracy", "eval/sampled/accuracy"]


def test_step_written_twice_counts_once_and_null_is_ignored(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": None},
        {"step": 2, "a": 3.0},
        {"step": 3, "b": 1.0},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert curve(read_metrics(tmp_path / "m.jsonl"), "a") == ([2], [3.0])


def test_report_compares_memory_with_its_estimate(tmp_path: Path) -> None:
    folder = dead_run(tmp_path)
    assert trainer_memory(folder) == ""
    sink = JsonlSink(folder / "metrics.jsonl")
    for step, peak in ((8, 2.1), (9, 2.345)):
        sink.step(
            step, {"train/peak_memory_gb": peak, "train/estimated_memory_gb": 2.5}
        )
    sink.close()
    assert (
        trainer_memory(folder) == "trainer memory: 2.35 GB measured, 2.50 GB estimated"
    )


def test_report_of_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no steps"):
        write_report(tmp_path)


def rewards(
    step: int, mean: float, deviation: float, least: float, most: float
) -> MetricsRow:
    names = ("reward_mean", "reward_std", "reward_min", "reward_max")
    values = dict(zip(names, (mean, deviation, least, most), strict=True))
    return {"step": step} | {f"rollout/{name}": value for name, value in values.items()}


def held_out(step: int, scores: Mapping[str, float]) -> MetricsRow:
    row: MetricsRow = {"step": step}
    for name, value in scores.items():
        row |= {f"eval/{name}/accuracy": value}
        row |= {
            f"eval/{name}/accuracy_low": value - 0.1,
            f"eval/{name}/accuracy_high": value + 0.1,
        }
    return row


def climb(steps: int) -> list[MetricsRow]:
    return [
        rewards(step, 0.2 + 0.7 * step / steps, 0.4, 0.0, 1.0)
        for step in range(1, steps + 1)
    ]


BOTH = {"sampled": 0.33, "greedy": 0.43}
MANY = {
    f"set-{number}/{mode}": 0.1 + number / 20
    for number in range(8)
    for mode in ("sampled", "greedy")
}
LONG = {
    "a_very_long_name_of_a_held_out_set_" * 5 + "/sampled": 0.5,
    "x$y_$z/greedy": 0.4,
}
RUNS: dict[str, Sequence[MetricsRow]] = {
    "usual": [
        held_out(0, BOTH),
        *climb(12),
        held_out(12, {"sampled": 1.0, "greedy": 1.0}),
    ],
    "one step": climb(1),
    "one step, evaluated": [
        held_out(0, BOTH),
        *climb(1),
        held_out(1, BOTH),
    ],
    "two steps": climb(2),
    "evaluated only": [held_out(0, BOTH)],
    "many sets": [
        held_out(0, MANY),
        *climb(30),
        held_out(30, MANY),
    ],
    "long names": [held_out(0, LONG), *climb(3)],
    "equal rewards": [rewards(step, 1.0, 0.0, 1.0, 1.0) for step in range(1, 20)],
    "equal large rewards": [
        rewards(step, -500.0, 0.0, -500.0, -500.0) for step in range(1, 20)
    ],
    "large rewards": [
        held_out(0, BOTH),
        *(rewards(s, 3.0 * s, 9.0, -40.0, 990.0) for s in range(1, 300)),
    ],
    "of an earlier version": [
        {"step": step, "rollout/reward_mean": 0.4, "rollout/reward_std": 0.3}
        for step in range(1, 9)
    ],
}
ABOVE = Titles(
    title="SmolLM2-135M-Instruct on tasks.jsonl",
    subtitle="run a, agent my_agent:rollout",
)


def texts(figure: Figure) -> list[Text]:
    """All that are drawn; a tick beyond the axes has a text that is not."""
    shown_texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
    for panel in figure.axes:
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high or not tick.label1.get_visible():
                    shown_texts = [
                        text for text in shown_texts if text is not tick.label1
                    ]
                shown_texts = [text for text in shown_texts if text is not tick.label2]
    return shown_texts


def long_titles(folder: Path) -> Titles:
    """As long as they get, in wide letters."""
    write_configuration(
        folder,
        "QWEN-2.5-CODER-" * 20,
        task_file="SUMS-OF-TWO-NUMBERS-" * 20,
        rollout_function_path="MY.PACKAGE." * 20,
    )
    return titles(folder)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("long", [False, True])
def test_report_texts_stay_in_the_picture_and_do_not_overlap(
    run: str, long: bool, tmp_path: Path
) -> None:
    figure = figure_of(RUNS[run], long_titles(tmp_path) if long else ABOVE)
    figure.canvas.draw()
    shown = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    assert len(shown) >= 7
    frame = figure.bbox
    for name, box in shown:
        inside = (
            frame.x0 <= box.x0
            and box.x1 <= frame.x1
            and frame.y0 <= box.y0
            and box.y1 <= frame.y1
        )
        assert inside, f"{name!r} at {box} leaves {frame}"
    for at, (name, box) in enumerate(shown):
        for other, other_box in shown[at + 1 :]:
            assert not box.overlaps(other_box), (
                f"{name!r} and {other!r} cover each other"
            )


@pytest.mark.parametrize("run", RUNS)
def test_report_has_no_empty_chart_and_every_series_is_in_the_legend(run: str) -> None:
    figure = figure_of(RUNS[run], ABOVE)
    assert all(panel.has_data() for panel in figure.axes)
    (legend,) = figure.legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert len(entries) == len(set(entries))
    series = [*eval_names(RUNS[run])]
    assert sum(entry.startswith("held-out accuracy, ") for entry in entries) == len(
        series
    )
    has_rewards = "evaluated only" not in run
    assert any("training reward" in entry for entry in entries) == has_rewards
    banded = has_rewards and run != "of an earlier version"
    assert any("standard deviation" in entry for entry in entries) == banded


def test_legend_shows_values_before_and_after_training() -> None:
    (legend,) = figure_of(RUNS["usual"], ABOVE).legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert "held-out accuracy, sampled: 0.33 → 1" in entries


@pytest.mark.parametrize("run", RUNS)
def test_reward_band_lies_between_lowest_and_highest_reward_around_the_mean(
    run: str,
) -> None:
    rows = RUNS[run]
    steps, low, high = reward_band(rows)
    least, most = (
        dict(zip(*curve(rows, f"rollout/reward_{end}"), strict=True))
        for end in ("min", "max")
    )
    mean = dict(zip(*curve(rows, "rollout/reward_mean"), strict=True))
    for step, bottom, top in zip(steps, low, high, strict=True):
        assert least[step] <= bottom <= mean[step] <= top <= most[step]
    assert len(steps) == len(least)


def test_step_records_its_lowest_and_highest_reward() -> None:
    metrics = rollout_metrics(taken_batch(2, 3))
    assert [metrics[f"reward_{name}"].value() for name in ("min", "mean", "max")] == [
        0.0,
        1.0,
        2.0,
    ]


def write_configuration(folder: Path, model: str, **rollout: str) -> None:
    tables = {"model": {"model_path": model}, "rollout": rollout}
    (folder / "config.resolved.toml").write_text(tomli_w.dumps(tables))


def test_report_title_names_model_and_task(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    assert titles(folder) == Titles(title="my-run", subtitle="")
    agent = "my_agent:rollout"
    write_configuration(
        folder,
        "/models/SmolLM2",
        task_file="/data/sums.jsonl",
        rollout_function_path=agent,
    )
    assert titles(folder) == Titles(
        title="SmolLM2 on sums.jsonl", subtitle=f"run my-run, agent {agent}"
    )
    inside = "runs/first/checkpoints/step-000012/hugging_face"
    for path in (inside, str(Path(inside).parent)):
        write_configuration(
            folder, path, task_source_path="my_tasks:hard", rollout_function_path=agent
        )
        assert titles(folder).title == "first/step-000012 on my_tasks:hard"
    write_configuration(folder, "SmolLM2", rollout_function_path=agent)
    assert titles(folder) == Titles(title=f"SmolLM2 on {agent}", subtitle="run my-run")
    write_configuration(folder, "m" * 300, task_file="t" * 300)
    assert len(titles(folder).title) <= 72


def test_report_of_a_run_without_rewards_has_no_reward_chart(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.step(1, {"train/loss": 0.5})
    sink.close()
    assert not has_curve(read_metrics(tmp_path / "metrics.jsonl"))
    with pytest.raises(ConfigError, match="no reward and no held-out result"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()
