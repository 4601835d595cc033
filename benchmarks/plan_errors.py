"""Whether real runs took as long as `invrl plan` says: the time of a step that follows
from the lengths and rates of a run, at its own staleness and concurrency, over the time
that its steps took.

    python -m benchmarks.plan_errors record RUN_FOLDER --note TEXT \
        --out benchmarks/results/plan/NAME.json
    python -m benchmarks.plan_errors [--out FILE]

The first keeps what a plan reads of a run: times of steps, and group, times and tokens
of each rollout. The second compares all kept runs. Exit code 1: one took over 10 %
longer or shorter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from handmade_rollouts import summary

from benchmarks.record import RESULTS, entry
from invrl.buffer.config import Admission
from invrl.run.plan.plan import estimate, present_workload
from invrl.run.plan.recorded_workload import read_rollouts, recorded_workload
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.metrics_file import MetricsRow, read_metrics
from invrl.store.run_folder import RunFolder
from invrl.types.rollouts import RolloutSummary

RUNS = RESULTS / "plan"
TOLERANCE = 0.1
_TIMES = ("rollout", "train", "step", "checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    run: str
    max_staleness: int
    admission: Admission
    slots: int
    recorded_s: float
    planned_s: float

    @property
    def error(self) -> float:
        return self.planned_s / self.recorded_s - 1


def record(folder: RunFolder, note: str) -> dict[str, Any]:
    """Return what a plan reads of a run."""
    config = load_resolved(folder.config_path)
    rows = [row for row in read_metrics(folder.metrics_path) if row.get("time/train_s")]
    rollouts = read_rollouts(folder.store_path)
    begin = min(rollout.started_at for rollout in rollouts)
    names = [f"time/{name}_s" for name in _TIMES]
    made = entry("", {})
    return {
        "date": made.date,
        "commit": made.commit,
        "machine": made.machine,
        "note": note,
        "settings": {
            "rollout": {
                "rollout_batch_size": config.rollout.rollout_batch_size,
                "n_samples_per_prompt": config.rollout.n_samples_per_prompt,
                "rollout_concurrency": config.rollout.first_concurrency,
                "max_new_tokens": config.rollout.max_new_tokens,
            },
            "engine": {"num_engines": config.engine.num_engines},
            "buffer": {
                "max_staleness": config.buffer.max_staleness,
                "admission": config.buffer.admission,
                "when_stale": config.buffer.when_stale,
            },
        },
        "steps": [
            [round((row["time"] or 0.0) - begin, 3)]
            + [round(row.get(name) or 0.0, 4) for name in names]
            for row in rows
        ],
        "rollouts": [
            [
                rollout.group_id,
                round(rollout.started_at - begin, 3),
                round(rollout.finished_at - begin, 3),
                rollout.sampled_tokens,
            ]
            for rollout in rollouts
        ],
    }


def planned_step(path: Path) -> PlannedStep:
    """Compare the steps of a recorded run with those that a plan makes of it."""
    recorded = json.loads(path.read_text())
    config = resolve(Source(name=path.name, tables=recorded["settings"]))
    rows = [_row(step) for step in recorded["steps"]]
    rollouts = [_rollout(*values) for values in recorded["rollouts"]]
    rates, lengths = recorded_workload(config, rows, rollouts)
    slots = config.rollout.first_concurrency
    workload = replace(present_workload(rates, lengths), slots=slots)
    planned = estimate(
        workload,
        config.buffer.max_staleness,
        config.buffer.admission,
        when_stale=config.buffer.when_stale,
    )
    return PlannedStep(
        run=path.stem,
        max_staleness=config.buffer.max_staleness,
        admission=config.buffer.admission,
        slots=slots,
        recorded_s=_mean_step_s(rows, config.buffer.max_staleness),
        planned_s=planned.step_s,
    )


def _mean_step_s(rows: Sequence[MetricsRow], max_staleness: int) -> float:
    """Return the mean wall time of a step without checkpoints. The steps that fill the
    pipeline are left out."""
    first, *measured = rows[max_staleness + 1 :]
    seconds = (measured[-1]["time"] or 0.0) - (first["time"] or 0.0)
    checkpoints_s = fmean(row["time/checkpoint_s"] or 0.0 for row in measured)
    return seconds / len(measured) - checkpoints_s


def _row(step: Sequence[float]) -> MetricsRow:
    time, *seconds = step
    times = {
        f"time/{name}_s": value for name, value in zip(_TIMES, seconds, strict=True)
    }
    return {"time": time, **times}


def _rollout(
    group: str, started_at: float, finished_at: float, tokens: int
) -> RolloutSummary:
    return replace(
        summary(),
        group_id=group,
        started_at=started_at,
        finished_at=finished_at,
        sampled_tokens=tokens,
    )


def compare_all() -> Mapping[str, Any]:
    planned = [planned_step(path) for path in sorted(RUNS.glob("*.json"))]
    return {
        "date": entry("", {}).date,
        "commit": entry("", {}).commit,
        "runs": [{**asdict(step), "error": round(step.error, 4)} for step in planned],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a plan is too far from a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("record",))
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--note", default="", help="what ran beside the run")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    options = parser.parse_args(arguments)
    if options.command == "record":
        if options.run is None or options.out is None:
            parser.error("record needs RUN_FOLDER and --out")
        options.out.parent.mkdir(exist_ok=True)
        recorded = record(RunFolder(path=options.run), options.note)
        options.out.write_text(json.dumps(recorded) + "\n")
        return 0
    result = compare_all()
    for run in result["runs"]:
        print(
            f"{run['run']}: staleness {run['max_staleness']}, {run['recorded_s']:.3f} s a "
            f"step, planned {run['planned_s']:.3f} s ({run['error']:+.1%})"
        )
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(run["error"]) > TOLERANCE for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main())
