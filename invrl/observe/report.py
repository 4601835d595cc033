"""The reward curve, and held-out results before and after, as one picture from the run folder alone: its
metrics.jsonl, and for the title its configuration. Works for a dead run too (`invrl report RUN_FOLDER`)."""

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

REWARD, REWARD_STD = "rollout/reward_mean", "rollout/reward_std"
REWARD_MIN, REWARD_MAX = "rollout/reward_min", "rollout/reward_max"
EVAL_PREFIX, EVAL_SUFFIX = "eval/", "/accuracy"
"""Held-out results: `eval/[<set>/]<mode>/accuracy`, with its 95 % interval in `..._low` and `..._high`."""
_WIDTH = 9.0
_PANEL_HEIGHT = 3.6
_LEGEND_ROW_HEIGHT = 0.22
"""Inches."""
_TITLE_CHARACTERS = 72
_LEGEND_CHARACTERS = 95
"""What fits into the width, at the sizes of the texts."""
_DODGE = 0.02
"""Of the axis: how far the points of different held-out sets are moved apart in all, so that their intervals
do not cover each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Titles:
    """What stands above the picture."""

    title: str
    subtitle: str


def curve(rows: Sequence[MetricsRow], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; of a step with two rows the later counts."""
    points = {int(row["step"] or 0): value for row in rows if (value := row.get(name)) is not None}
    return [*points], [*points.values()]


def eval_names(rows: Sequence[MetricsRow]) -> list[str]:
    return sorted({n for row in rows for n in row if n.startswith(EVAL_PREFIX) and n.endswith(EVAL_SUFFIX)})


def has_curve(rows: Sequence[MetricsRow]) -> bool:
    """Whether there is anything to draw: a reward or a held-out result. The trainer alone has none."""
    return any(curve(rows, name)[0] for name in (REWARD, *eval_names(rows)))


def reward_band(rows: Sequence[MetricsRow]) -> tuple[list[int], list[float], list[float]]:
    """Steps, lower and upper edge: the mean of a step's rewards less and plus their standard deviation, but
    not beyond the lowest and the highest of them. Steps of which one of these is not known are left out."""
    values = {name: dict(zip(*curve(rows, name), strict=True)) for name in _BAND}
    steps = [step for step in values[REWARD] if all(step in of_name for of_name in values.values())]
    low: list[float] = []
    high: list[float] = []
    for step in steps:
        mean, deviation, least, most = (values[name][step] for name in _BAND)
        low.append(max(least, mean - deviation))
        high.append(min(most, mean + deviation))
    return steps, low, high


_BAND = (REWARD, REWARD_STD, REWARD_MIN, REWARD_MAX)


def titles(run_folder: Path) -> Titles:
    """Model and task from the run's configuration; the run's name where that cannot be read."""
    try:
        tables = tomllib.loads((run_folder / "config.resolved.toml").read_text())
    except (OSError, ValueError):
        return Titles(title=_fitted(run_folder.name, _TITLE_CHARACTERS), subtitle="")
    model = _model_name(_text(tables, "model", "model_path"))
    task = _task_name(tables)
    title = " on ".join(filter(None, (model, task))) or run_folder.name
    agent = _text(tables, "rollout", "rollout_function_path")
    subtitle = f"run {run_folder.name}" + (f", agent {agent}" if agent and agent != task else "")
    return Titles(title=_fitted(title, _TITLE_CHARACTERS), subtitle=_fitted(subtitle, _LEGEND_CHARACTERS))


def _text(tables: Mapping[str, object], table: str, key: str) -> str:
    section = tables.get(table)
    value = section.get(key) if isinstance(section, dict) else None
    return value if isinstance(value, str) else ""


def _model_name(path: str) -> str:
    """The folder's name; of a checkpoint's model also its run and step."""
    parts = [part for part in Path(path).parts if part not in ("checkpoints", "hugging_face", "/")]
    if parts and parts[-1].startswith("step-"):
        return "/".join(parts[-2:])
    return parts[-1] if parts else ""


def _task_name(tables: Mapping[str, object]) -> str:
    """The file of tasks, or the function that makes them, or the agent where it is both."""
    file = _text(tables, "rollout", "task_file")
    source = _text(tables, "rollout", "task_source_path")
    agent = _text(tables, "rollout", "rollout_function_path")
    return Path(file).name or source or agent


def _fitted(text: str, characters: int) -> str:
    """Without its middle where it is too long for a line."""
    text = " ".join(text.split())
    if len(text) <= characters:
        return text
    head = (characters - 1) // 2
    return f"{text[:head]}…{text[len(text) - (characters - 1 - head) :]}"


def write_report(run_folder: Path) -> Path:
    """Draws `report/reward.png` in the run folder; its path. Raises ConfigError where there is nothing to
    draw."""
    rows = read_metrics(run_folder / "metrics.jsonl")
    if not rows:
        raise ConfigError("run folder", str(run_folder), "no steps in metrics.jsonl", "give a run's folder")
    if not has_curve(rows):
        reason = "metrics.jsonl has no reward and no held-out result, as that of --debug-train-only"
        raise ConfigError("run folder", str(run_folder), reason, "give the folder of a run with rollouts")
    picture = run_folder / "report" / "reward.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():  # a name in letters that the font lacks is drawn as boxes
        warnings.simplefilter("ignore", UserWarning)
        figure_of(rows, titles(run_folder)).savefig(picture, dpi=120)
    return picture


def figure_of(rows: Sequence[MetricsRow], above: Titles) -> Figure:
    """Rewards and held-out accuracies in one panel where both are shares, else each in its own. All numbers
    stand in the legend, below the panels: nothing is written where curves are."""
    # Agg through the object interface: no display, no global state of pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    names = [name for name in eval_names(rows) if curve(rows, name)[0]]
    steps, _ = curve(rows, REWARD)
    together = not steps or not names or _are_shares(rows)
    entries = bool(steps) * 2 + len(names)
    columns = 1 if any(len(_legend_name(name)) > 24 for name in names) else 2
    panels = 1 if together else 2
    height = panels * _PANEL_HEIGHT + 0.9 + _LEGEND_ROW_HEIGHT * -(-entries // columns)
    figure = Figure(figsize=(_WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(panels, 1, 1)]
    if panels == 2:
        axes.append(figure.add_subplot(panels, 1, 2, sharex=axes[0]))
    if steps:
        _draw_reward(axes[0], rows)
    _draw_held_out(axes[-1], rows, names, first_color=1 if steps else 0)
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        low, high = panel.dataLim.intervaly
        if low >= 0.0 and high <= 1.0:
            panel.set_ylim(-0.04, 1.04)
        elif low == high:
            panel.set_ylim(low - 1.0, high + 1.0)
    at = [
        int(row["step"] or 0) for row in rows if any(row.get(name) is not None for name in (REWARD, *names))
    ]
    room = max(0.5, 0.03 * (max(at) - min(at)))
    axes[0].set_xlim(min(at) - room, max(at) + room)
    axes[0].set_ylabel(_what(bool(steps), bool(names) and together))
    if panels == 2:
        axes[1].set_ylabel(_what(False, True))
    axes[-1].set_xlabel("step" if not names else "step (held-out at 0: before training)")
    figure.suptitle(above.title, fontsize=12, parse_math=False)
    axes[0].set_title(above.subtitle, fontsize=9, color="0.35", parse_math=False)
    legend = figure.legend(loc="outside lower left", ncols=columns, fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _are_shares(rows: Sequence[MetricsRow]) -> bool:
    """Whether all rewards are within 0 and 1, as accuracies are."""
    values = [value for name in (REWARD, REWARD_MIN, REWARD_MAX) for value in curve(rows, name)[1]]
    return all(-0.05 <= value <= 1.05 for value in values)


def _what(reward: bool, accuracy: bool) -> str:
    return ", ".join(["reward"] * reward + ["accuracy"] * accuracy)


def _draw_reward(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    steps, reward = curve(rows, REWARD)
    marker = "o" if len(steps) <= 30 else ""
    label = f"training reward, mean of a step's rollouts: {_from_to(reward)}"
    axes.plot(steps, reward, color="C0", linewidth=1.4, marker=marker, markersize=3, label=label)
    banded, low, high = reward_band(rows)
    spread = "± their standard deviation, within the lowest and the highest"
    if len(banded) == 1:  # an area of no width
        axes.vlines(banded, low, high, color="C0", alpha=0.3, linewidth=6, label=spread)
    elif banded:
        axes.fill_between(banded, low, high, color="C0", alpha=0.15, linewidth=0, label=spread)


def _draw_held_out(axes: Axes, rows: Sequence[MetricsRow], names: Sequence[str], *, first_color: int) -> None:
    """Accuracies with their intervals, those of different sets beside each other."""
    at = [step for name in names for step in curve(rows, name)[0]]
    at += curve(rows, REWARD)[0]
    apart = _DODGE * max(1, max(at) - min(at)) if len(names) > 1 else 0.0
    for place, name in enumerate(names):
        steps, accuracy = curve(rows, name)
        low = dict(zip(*curve(rows, name + "_low"), strict=True))
        high = dict(zip(*curve(rows, name + "_high"), strict=True))
        aside = apart * (place / max(1, len(names) - 1) - 0.5)
        moved = [step + aside for step in steps]
        color = f"C{(first_color + place) % 10}"
        label = f"held-out accuracy, {_legend_name(name)}: {_from_to(accuracy)}"
        style = ("--", "-.", ":")[place // 10 % 3]
        axes.plot(moved, accuracy, f"o{style}", color=color, markersize=4, linewidth=1.0, label=label)
        for step, at in zip(steps, moved, strict=True):
            if step in low and step in high:
                axes.vlines(at, low[step], high[step], color=color, alpha=0.5)


def _legend_name(name: str) -> str:
    """Set and mode of a metric's name."""
    return _fitted(name[len(EVAL_PREFIX) : -len(EVAL_SUFFIX)], 60)


def _from_to(values: Sequence[float]) -> str:
    """The first and the last."""
    first, last = values[0], values[-1]
    return f"{first:.3g}" if len(values) == 1 else f"{first:.3g} → {last:.3g}"
