"""`invrl report RUN_FOLDER`: draws the reward curve and the held-out results of a run
as one picture.

The curves come from metrics.jsonl, the title from the configuration. Works for a dead
run too."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.errors import ConfigError
from invrl.store.metrics_file import MetricsRow, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REWARD = "rollout/reward_mean"
REWARD_STD = "rollout/reward_std"
REWARD_MIN = "rollout/reward_min"
REWARD_MAX = "rollout/reward_max"
PEAK_MEMORY = "train/peak_memory_gb"
ESTIMATED_MEMORY = "train/estimated_memory_gb"
EVAL_PREFIX = "eval/"
EVAL_SUFFIX = "/accuracy"
"""Held-out results: `eval/[<set>/]<mode>/accuracy`, with its 95 % interval in `..._low`
and `..._high`."""
_WIDTH = 9.0
"""Inches, as the heights below."""
_PANEL_HEIGHT = 3.6
_TEXT_HEIGHT = 0.9
_LEGEND_ROW_HEIGHT = 0.22
_MAX_TITLE_CHARACTERS = 72
"""As many as fit into the width, at the size of the title."""
_MAX_LEGEND_CHARACTERS = 95
_MAX_NAME_CHARACTERS = 60
_MAX_NAME_IN_TWO_COLUMNS = 24
_DODGE = 0.02
"""How far the points of different held-out sets are moved apart in all, as a share of
the axis, so that their intervals do not cover each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Titles:
    """The lines above the picture."""

    title: str
    subtitle: str


def curve(rows: Sequence[MetricsRow], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric. If a step has two rows, the later one counts."""
    points = _points(rows, name)
    return list(points), list(points.values())


def _points(rows: Sequence[MetricsRow], name: str) -> dict[int, float]:
    """By step."""
    points: dict[int, float] = {}
    for row in rows:
        value = row.get(name)
        if value is not None:
            points[int(row["step"] or 0)] = value
    return points


def eval_names(rows: Sequence[MetricsRow]) -> list[str]:
    """The names of the held-out accuracies, sorted."""
    names: set[str] = set()
    for row in rows:
        for name in row:
            if name.startswith(EVAL_PREFIX) and name.endswith(EVAL_SUFFIX):
                names.add(name)
    return sorted(names)


def has_curve(rows: Sequence[MetricsRow]) -> bool:
    """Whether there is a reward or a held-out result to draw. A run of the trainer
    alone has neither."""
    return any(_points(rows, name) for name in (REWARD, *eval_names(rows)))


def reward_band(
    rows: Sequence[MetricsRow],
) -> tuple[list[int], list[float], list[float]]:
    """Steps, lower and upper edges: the mean of a step's rewards minus and plus their
    standard deviation, but not beyond the lowest and the highest of them. Steps without
    one of these metrics are left out."""
    means = _points(rows, REWARD)
    deviations = _points(rows, REWARD_STD)
    lowest = _points(rows, REWARD_MIN)
    highest = _points(rows, REWARD_MAX)
    steps = [
        step
        for step in means
        if step in deviations and step in lowest and step in highest
    ]
    low = [max(lowest[step], means[step] - deviations[step]) for step in steps]
    high = [min(highest[step], means[step] + deviations[step]) for step in steps]
    return steps, low, high


def titles(run_folder: Path) -> Titles:
    """Model and task from the run's configuration; the run's name if that cannot be
    read."""
    try:
        tables = tomllib.loads(
            (run_folder / "config.resolved.toml").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return Titles(
            title=_shorten(run_folder.name, _MAX_TITLE_CHARACTERS), subtitle=""
        )
    model = _model_name(_setting(tables, "model", "model_path"))
    task = _task_name(tables)
    title = model or task or run_folder.name
    if model and task:
        title = f"{model} on {task}"
    subtitle = f"run {run_folder.name}"
    agent = _setting(tables, "rollout", "rollout_function_path")
    if agent and agent != task:
        subtitle += f", agent {agent}"
    return Titles(
        title=_shorten(title, _MAX_TITLE_CHARACTERS),
        subtitle=_shorten(subtitle, _MAX_LEGEND_CHARACTERS),
    )


def _setting(tables: Mapping[str, object], table: str, key: str) -> str:
    """A setting that is a text; "" if it is missing."""
    section = tables.get(table)
    if not isinstance(section, dict):
        return ""
    value = section.get(key)
    if not isinstance(value, str):
        return ""
    return value


def _model_name(path: str) -> str:
    """The folder's name; for the model of a checkpoint also its run and step."""
    parts = [
        part
        for part in Path(path).parts
        if part not in ("checkpoints", "hugging_face", "/")
    ]
    if not parts:
        return ""
    if parts[-1].startswith("step-"):
        return "/".join(parts[-2:])
    return parts[-1]


def _task_name(tables: Mapping[str, object]) -> str:
    """The file of tasks, or the function that makes them, or the agent if it does
    both."""
    task_file = _setting(tables, "rollout", "task_file")
    if task_file:
        return Path(task_file).name
    task_source = _setting(tables, "rollout", "task_source_path")
    return task_source or _setting(tables, "rollout", "rollout_function_path")


def _shorten(text: str, characters: int) -> str:
    """One line. A text that is too long loses its middle."""
    text = " ".join(text.split())
    if len(text) <= characters:
        return text
    head = (characters - 1) // 2
    tail = characters - 1 - head
    return f"{text[:head]}…{text[-tail:]}"


def trainer_memory(run_folder: Path) -> str:
    """A sentence that compares the memory of the trainer's largest rank with its
    estimate; "" for a run that has not measured it."""
    rows = read_metrics(run_folder / "metrics.jsonl")
    _, measured = curve(rows, PEAK_MEMORY)
    _, estimated = curve(rows, ESTIMATED_MEMORY)
    if not measured or not estimated:
        return ""
    return f"trainer memory: {max(measured):.2f} GB measured, {estimated[-1]:.2f} GB estimated"


def write_report(run_folder: Path) -> Path:
    """Draws `report/reward.png` in the run folder and returns its path. Raises
    ConfigError if there is nothing to draw."""
    rows = read_metrics(run_folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(
            "run folder",
            str(run_folder),
            "no steps in metrics.jsonl",
            "give a run's folder",
        )
    if not has_curve(rows):
        reason = "metrics.jsonl has no reward and no held-out result, as that of --debug-train-only"
        raise ConfigError(
            "run folder",
            str(run_folder),
            reason,
            "give the folder of a run with rollouts",
        )
    picture = run_folder / "report" / "reward.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    with (
        warnings.catch_warnings()
    ):  # a name in letters that the font lacks is drawn as boxes
        warnings.simplefilter("ignore", UserWarning)
        figure = figure_of(rows, titles(run_folder))
        figure.savefig(picture, dpi=120)
    return picture


def figure_of(rows: Sequence[MetricsRow], above: Titles) -> Figure:
    """Rewards and held-out accuracies, in one panel if both are shares, otherwise in a
    panel each. All numbers are in the legend below the panels: no text covers the
    curves."""
    # Agg through the object interface: no display, no global state of pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    names = [name for name in eval_names(rows) if _points(rows, name)]
    has_reward = bool(_points(rows, REWARD))
    num_panels = 1
    if has_reward and names and not _are_shares(rows):
        num_panels = 2
    columns = 2
    if any(len(_legend_name(name)) > _MAX_NAME_IN_TWO_COLUMNS for name in names):
        columns = 1
    legend_rows = _legend_rows(len(names), has_reward=has_reward, columns=columns)
    height = (
        num_panels * _PANEL_HEIGHT + _TEXT_HEIGHT + _LEGEND_ROW_HEIGHT * legend_rows
    )

    figure = Figure(
        figsize=(_WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    top_panel = figure.add_subplot(num_panels, 1, 1)
    bottom_panel = top_panel
    if num_panels == 2:
        bottom_panel = figure.add_subplot(num_panels, 1, 2, sharex=top_panel)

    first_color = 0
    if has_reward:
        _draw_reward(top_panel, rows)
        first_color = 1
    _draw_held_out(bottom_panel, rows, names, first_color=first_color)
    bottom_panel.set_ylabel("accuracy")
    if has_reward:
        label = "reward"
        if names and num_panels == 1:
            label = "reward, accuracy"
        top_panel.set_ylabel(label)
    _scale_panel(top_panel)
    if num_panels == 2:
        _scale_panel(bottom_panel)
    _set_step_limits(top_panel, rows, names)
    step_label = "step"
    if names:
        step_label = "step (held-out at 0: before training)"
    bottom_panel.set_xlabel(step_label)

    figure.suptitle(above.title, fontsize=12, parse_math=False)
    top_panel.set_title(above.subtitle, fontsize=9, color="0.35", parse_math=False)
    legend = figure.legend(
        loc="outside lower left", ncols=columns, fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _legend_rows(num_names: int, *, has_reward: bool, columns: int) -> int:
    entries = num_names
    if has_reward:
        entries += 2  # the mean, and the band around it
    return (entries + columns - 1) // columns


def _scale_panel(panel: Axes) -> None:
    """Whole steps on the x axis; 0 to 1 on the y axis if all values are within it."""
    from matplotlib.ticker import MaxNLocator

    panel.grid(alpha=0.3)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = panel.dataLim.intervaly
    if low >= 0.0 and high <= 1.0:
        panel.set_ylim(-0.04, 1.04)
    elif low == high:
        panel.set_ylim(low - 1.0, high + 1.0)


def _set_step_limits(
    panel: Axes, rows: Sequence[MetricsRow], names: Sequence[str]
) -> None:
    first_step, last_step = _step_range(rows, names)
    margin = max(0.5, 0.03 * (last_step - first_step))
    panel.set_xlim(first_step - margin, last_step + margin)


def _step_range(rows: Sequence[MetricsRow], names: Sequence[str]) -> tuple[int, int]:
    """The first and the last step with a reward or one of these metrics."""
    steps = [step for name in (REWARD, *names) for step in _points(rows, name)]
    return min(steps), max(steps)


def _are_shares(rows: Sequence[MetricsRow]) -> bool:
    """Whether all rewards are within 0 and 1, as accuracies are."""
    for name in (REWARD, REWARD_MIN, REWARD_MAX):
        if not all(-0.05 <= value <= 1.05 for value in _points(rows, name).values()):
            return False
    return True


def _draw_reward(panel: Axes, rows: Sequence[MetricsRow]) -> None:
    steps, rewards = curve(rows, REWARD)
    marker = ""
    if len(steps) <= 30:
        marker = "o"
    label = f"training reward, mean of a step's rollouts: {_first_and_last(rewards)}"
    panel.plot(
        steps,
        rewards,
        color="C0",
        linewidth=1.4,
        marker=marker,
        markersize=3,
        label=label,
    )
    band_steps, low, high = reward_band(rows)
    label = "± their standard deviation, within the lowest and the highest"
    if len(band_steps) == 1:  # an area would have no width
        panel.vlines(
            band_steps, low, high, color="C0", alpha=0.3, linewidth=6, label=label
        )
    elif band_steps:
        panel.fill_between(
            band_steps, low, high, color="C0", alpha=0.15, linewidth=0, label=label
        )


def _draw_held_out(
    panel: Axes, rows: Sequence[MetricsRow], names: Sequence[str], *, first_color: int
) -> None:
    """Accuracies with their intervals, those of different sets beside each other."""
    if not names:
        return
    first_step, last_step = _step_range(rows, names)
    width = 0.0
    if len(names) > 1:
        width = _DODGE * max(1, last_step - first_step)
    for number, name in enumerate(names):
        steps, accuracies = curve(rows, name)
        offset = width * (number / max(1, len(names) - 1) - 0.5)
        moved_steps = [step + offset for step in steps]
        color = f"C{(first_color + number) % 10}"
        line_style = ("--", "-.", ":")[number // 10 % 3]
        numbers = _first_and_last(accuracies)
        panel.plot(
            moved_steps,
            accuracies,
            f"o{line_style}",
            color=color,
            markersize=4,
            linewidth=1.0,
            label=f"held-out accuracy, {_legend_name(name)}: {numbers}",
        )
        low = _points(rows, f"{name}_low")
        high = _points(rows, f"{name}_high")
        for step, moved_step in zip(steps, moved_steps, strict=True):
            if step in low and step in high:
                panel.vlines(moved_step, low[step], high[step], color=color, alpha=0.5)


def _legend_name(name: str) -> str:
    """Set and mode from a metric's name."""
    return _shorten(
        name.removeprefix(EVAL_PREFIX).removesuffix(EVAL_SUFFIX), _MAX_NAME_CHARACTERS
    )


def _first_and_last(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{values[0]:.3g} → {values[-1]:.3g}"
