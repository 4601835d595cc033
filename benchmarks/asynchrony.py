"""Speed and selection of asynchronous training, on a clock that jumps: the real loop,
dispatcher and buffer, an engine that only takes time and a trainer that only sleeps.

    python -m benchmarks.asynchrony [--num-steps 100] [--out FILE]

The score is the tokens per second that were asked for and trained, over the most that
an engine and a trainer side by side can do: tokens of a batch over the longer of the
packed generation (all slots in use) and the training step, with the mean of the lengths
that were drawn. The steps that fill the pipeline, one more than the staleness allows,
are left out. The score is 0 if the mean length of what was trained differs from that of
what was asked for by more than 2 %, or if the lengths are distributed differently
(Kolmogorov-Smirnov, p < 0.01).

Runs that let a batch wait for old rollouts are also compared with the most that their
rule allows (`benchmarks/waiting_optimum.py`): `of_optimum`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from virtual_run import Setting, virtual_run

from benchmarks.record import entry
from benchmarks.waiting_optimum import Pace, least_seconds
from invrl.buffer.config import Admission, WhenStale
from invrl.buffer.selection import same_distribution
from invrl.run.plan.workload import Workload

_LENGTH_TOLERANCE = 0.02
_SMALLEST_P = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    max_staleness: int
    when_stale: WhenStale
    admission: Admission


MODES = (
    Mode(max_staleness=4, when_stale="train", admission="groups"),
    Mode(max_staleness=4, when_stale="train", admission="ready"),
    Mode(max_staleness=4, when_stale="wait", admission="groups"),
    Mode(max_staleness=0, when_stale="train", admission="groups"),
)
SIGMAS = (1.0, 0.5)
SLOTS_PER_ROLLOUT = (2.0, 1.0, 0.5)
TRAINING_SHARES = (1.0, 0.5, 2.0)


def measure(setting: Setting, mode: Mode, num_steps: int) -> dict[str, float]:
    workload = setting.workload
    result = virtual_run(
        workload,
        num_steps=num_steps,
        max_staleness=mode.max_staleness,
        when_stale=mode.when_stale,
        admission=mode.admission,
    )
    tokens = workload.rollouts * fmean(result.asked_lengths)
    packed_s = tokens * workload.step_s(workload.slots) / workload.slots
    bound = tokens / max(packed_s, workload.trainer_s)
    speed = result.tokens_per_s(after_step=mode.max_staleness + 1) / bound
    p_value = same_distribution(result.asked_lengths, result.trained_of_asked)
    is_biased = (
        abs(result.length_ratio - 1) > _LENGTH_TOLERANCE or p_value < _SMALLEST_P
    )
    measured = {
        "score": 0.0 if is_biased else speed,
        "speed": speed,
        "length_ratio": result.length_ratio,
        "p_value": p_value,
        "age_mean": float(np.mean(result.ages)),
        "age_p99": float(np.percentile(result.ages, 99)),
        "age_max": float(max(result.ages)),
    }
    if mode.when_stale == "wait":
        optimum = waiting_tokens_per_s(workload, mode.max_staleness, num_steps)
        measured["optimum"] = optimum / bound
        measured["of_optimum"] = speed * bound / optimum
    return measured


def waiting_tokens_per_s(
    workload: Workload, max_staleness: int, num_steps: int
) -> float:
    """Return the most tokens per second of the measured steps under the rule
    `wait`."""
    batches: list[list[float]] = []
    for step in range(max_staleness + 1, num_steps):
        batches.append([])
        for number in range(step * workload.groups, (step + 1) * workload.groups):
            batches[-1] += workload.lengths.of_group(number)
    pace = Pace(
        slots=workload.slots,
        token_s=workload.token_s,
        request_s=workload.request_s,
        training_s=workload.training_s,
    )
    seconds = least_seconds(batches, max_staleness=max_staleness, pace=pace)
    return sum(length for batch in batches for length in batch) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="the results as JSON")
    given = parser.parse_args(arguments)
    made = entry("none, virtual time", {})
    rows: list[dict[str, object]] = []
    result = {
        "date": made.date,
        "commit": made.commit,
        "num_steps": given.num_steps,
        "rows": rows,
    }
    for sigma, mode, slots, share in itertools.product(
        SIGMAS, MODES, SLOTS_PER_ROLLOUT, TRAINING_SHARES
    ):
        setting = Setting(sigma=sigma, slots_per_rollout=slots, training_share=share)
        measured = measure(setting, mode, given.num_steps)
        rows.append({**asdict(setting), **asdict(mode), **measured})
        print(
            f"{mode.when_stale}, {mode.admission}, staleness {mode.max_staleness}; "
            f"sigma {sigma:g}, slots {slots:g}, training {share:g}: "
            + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()),
            flush=True,
        )
        if given.out is not None:
            text = json.dumps(result, indent=1) + "\n"
            given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
