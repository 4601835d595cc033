"""Does every algorithm learn the quickstart's task, and unlearn it with the sign of its
advantages flipped?

Each is a run of `invrl train --config quickstart` with other flags, one after the
other, on the same tasks. What is kept of a run is the held-out score before and after
with the gain's 95 % interval. An algorithm has learned if the interval is above 0; with
flipped advantages it must be below 0.

    python -m benchmarks.algorithms --model-path MODEL --out
    benchmarks/results/algorithms.json
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import ROOT

_RUN_S = 1800.0
_GAIN = re.compile(
    r"held-out accuracy, (?P<mode>\S+) \(.*?\): (?P<before>[\d.]+) -> (?P<after>[\d.]+), "
    r"gain (?P<gain>[+-][\d.]+), 95 % interval \[(?P<low>[+-][\d.]+), (?P<high>[+-][\d.]+)\]"
)
_FLIPPED = "benchmarks.flipped_advantages"

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": ("--algorithm-preset", "grpo", "--no-kl"),
    "gspo": ("--algorithm-preset", "gspo"),
    "cispo": ("--algorithm-preset", "cispo"),
    "rloo": ("--algorithm-preset", "rloo"),
    "ppo": (
        *(
            "--algorithm-preset",
            "ppo",
            "--critic.gae-lambda",
            "1",
            "--critic.returns-lambda",
            "1",
        ),
        *("--critic.lr", "1e-4", "--critic.warmup-steps", "2", "--num-steps", "16"),
    ),
    "decoupled_ppo": ("--algorithm-preset", "decoupled_ppo", "--max-staleness", "2"),
    "lambda_grpo": ("--algorithm-preset", "lambda_grpo"),
    "distillation": ("--objective", "distillation"),
}
"""Flags of each, after those that all runs share. The teacher of distillation is the
model that the run of grpo made."""
_FLIPS: dict[str, tuple[str, ...]] = {
    "rloo": ("--advantage", f"{_FLIPPED}:rloo"),
    "ppo": ("--policy-loss", f"{_FLIPPED}:clip"),
    "distillation": ("--policy-loss", f"{_FLIPPED}:clip"),
}
"""Flags that flip the sign of every token's advantage. Those of grpo where none are
named."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    algorithm: str
    flipped: bool
    flags: tuple[str, ...]
    before: float
    after: float
    gain: float
    low: float
    high: float
    wall_s: float

    @property
    def as_it_should(self) -> bool:
        return self.high < 0 if self.flipped else self.low > 0


def run(
    algorithm: str,
    shared: tuple[str, ...],
    root: Path,
    *,
    flipped: bool,
    teacher: Path | None = None,
) -> Outcome:
    """`teacher`: of distillation; None: the model that the run of grpo made. Raises
    RuntimeError for a run that fails or does not report its gain."""
    flags = (*shared, *ALGORITHMS[algorithm])
    if algorithm == "distillation":
        if teacher is None:
            [*_, teacher] = sorted((root / "grpo" / "checkpoints").glob("step-*"))
        flags += ("--teacher.model-path", str(teacher))
    if flipped:
        flags += _FLIPS.get(algorithm, ("--advantage", f"{_FLIPPED}:grpo"))
    name = f"{algorithm}-flipped" if flipped else algorithm
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "train",
        "--config",
        "quickstart",
        *flags,
    ]
    command += [
        "--run-root",
        str(root),
        "--run-name",
        name,
        "--log.progress",
        "plain",
        "--no-log.samples",
    ]
    started = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_S
    )
    found = _GAIN.search(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(
            f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
        )
    numbers = {
        key: float(found[key]) for key in ("before", "after", "gain", "low", "high")
    }
    wall_s = round(time.monotonic() - started, 1)
    return Outcome(
        algorithm=algorithm, flipped=flipped, flags=flags, wall_s=wall_s, **numbers
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument(
        "--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS)
    )
    parser.add_argument("--num-steps", type=int, default=8)
    parser.add_argument("--eval-tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--no-flipped", action="store_true", help="without the negative controls"
    )
    which.add_argument(
        "--only-flipped", action="store_true", help="the negative controls alone"
    )
    parser.add_argument(
        "--teacher-model-path", type=Path, help="of distillation; default: grpo's model"
    )
    parser.add_argument(
        "--out", type=Path, help="the result as JSON, added to what is there"
    )
    options = parser.parse_args()
    shared = ("--model-path", options.model_path, "--num-steps", str(options.num_steps))
    shared += (
        "--eval-tasks",
        str(options.eval_tasks),
        "--eval.modes",
        "sampled",
        "--seed",
        str(options.seed),
    )
    outcomes: list[dict[str, object]] = []
    all_right = True
    with tempfile.TemporaryDirectory(prefix="invrl-algorithms-") as root:
        for algorithm in options.algorithms:
            signs = [True] if options.only_flipped else [False, True]
            if options.no_flipped:
                signs = [False]
            for flipped in signs:
                outcome = run(
                    algorithm,
                    shared,
                    Path(root),
                    flipped=flipped,
                    teacher=options.teacher_model_path,
                )
                all_right &= outcome.as_it_should
                outcomes.append(
                    {**asdict(outcome), "as_it_should": outcome.as_it_should}
                )
                print(json.dumps(outcomes[-1]), flush=True)
    if options.out:
        held = json.loads(options.out.read_text()) if options.out.exists() else []
        held.append(
            {
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "machine": platform.processor() or platform.machine(),
                "outcomes": outcomes,
            }
        )
        options.out.write_text(json.dumps(held, indent=2) + "\n")
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
