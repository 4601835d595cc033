"""The reward curve, and held-out results before and after, as one picture from metrics.jsonl alone.
Works for a dead run too (`invrl report RUN_FOLDER`). Called by `training.py` at the end of a run."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from invrl.errors import ConfigError

Json = dict[str, float | None]
REWARD, REWARD_STD = "rollout/reward_mean", "rollout/reward_std"
EVAL_PREFIX, EVAL_SUFFIX = "eval/", "/accuracy"
"""Held-out results: `eval/[<set>/]<mode>/accuracy`, with its 95 % interval in `..._low` and `..._high`."""


def read_metrics(path: Path) -> list[Json]:
    """The rows of metrics.jsonl, if there is one. A line that is none is left out: the torn last one of a
    killed run, or bytes of a damaged file, be they UTF-8 or not."""
    rows: list[Json] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # JSONDecodeError and UnicodeDecodeError are both
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def curve(rows: Sequence[Json], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; of a step with two rows the later counts."""
    points = {int(row["step"] or 0): value for row in rows if (value := row.get(name)) is not None}
    return [*points], [*points.values()]


def eval_names(rows: Sequence[Json]) -> list[str]:
    return sorted({n for row in rows for n in row if n.startswith(EVAL_PREFIX) and n.endswith(EVAL_SUFFIX)})


def write_report(run_folder: Path) -> Path:
    """Draw `report/reward.png` in the run folder; its path. Raises ConfigError without metrics."""
    if not (rows := read_metrics(run_folder / "metrics.jsonl")):
        raise ConfigError("run folder", str(run_folder), "no steps in metrics.jsonl", "give a run's folder")
    picture = run_folder / "report" / "reward.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(rows, run_folder.name, picture)
    return picture


def _draw(rows: Sequence[Json], title: str, picture: Path) -> None:
    # Agg through the object interface: no display, no global state of pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    (steps, reward), (spread_steps, spread) = curve(rows, REWARD), curve(rows, REWARD_STD)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    label = "training reward (mean of the batch)"
    axes.plot(steps, reward, color="C0", linewidth=1.2, label=label)
    if spread_steps == steps:
        low = [mean - std for mean, std in zip(reward, spread, strict=True)]
        high = [mean + std for mean, std in zip(reward, spread, strict=True)]
        axes.fill_between(steps, low, high, color="C0", alpha=0.12, linewidth=0)
    for i, name in enumerate(eval_names(rows)):
        (steps, shares), (_, low), (_, high) = (curve(rows, name + part) for part in ("", "_low", "_high"))
        color, mode = f"C{i + 1}", name[len(EVAL_PREFIX) : -len(EVAL_SUFFIX)]
        axes.plot(steps, shares, "o--", color=color, label=f"held-out accuracy, {mode}")
        if len(steps) == len(low) == len(high):
            axes.vlines(steps, low, high, color=color, alpha=0.5)
        for point in zip(steps, shares, strict=True):
            axes.annotate(f"{point[1]:.2f}", point, xytext=(4, 4), textcoords="offset points", color=color)
    axes.set(title=title, xlabel="step", ylabel="reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    figure.savefig(picture, dpi=120)
