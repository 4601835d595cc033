"""`python -m gpu_check [STAGE ...]`: runs stages one after the other, all of them by
default.

Prints one line of JSON for each, and writes `gpu.json` after each. A stage that fails
costs none of the others. With SMOKE=1 in the environment the same code runs small, on a
CPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu_check.card import busy_reason, busy_reason_after
from gpu_check.record import Record
from gpu_check.settings import CheckSettings
from gpu_check.stage import Outcome, not_run, run_stage
from gpu_check.stages import STAGES

_PROJECT = Path(__file__).parents[3]
_SMOKE_PATIENCE = 20
"""How much longer a stage may take on a CPU."""
_MEMORY_FREED_S = 15.0
"""For the memory of the stage before to be given back."""
_TOO_LITTLE_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every stage passed or was skipped."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages) - set(STAGES))
    if unknown:
        parser.error(
            f"no such stage: {', '.join(unknown)}; there are {', '.join(STAGES)}"
        )
    settings = _settings(options)
    settings.out.mkdir(parents=True, exist_ok=True)
    settings.work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    if not settings.smoke:
        reason = busy_reason()
        if reason is not None:
            print(f"no stage is run: {reason}", file=sys.stderr)
            return 2
    record = Record(settings.out / "gpu.json")
    states: list[str] = []
    give_up_at = start + options.deadline
    names = options.stages or list(STAGES)
    outcomes = _run_at_once if options.at_once else _run_in_turn
    for name, outcome in outcomes(names, settings, give_up_at):
        record.add(name, outcome)
        states.append(outcome.state)
        print(json.dumps({"stage": name, **outcome.as_json()}), flush=True)
    print(json.dumps({"total_s": round(time.monotonic() - start, 1)}), flush=True)
    return 0 if {"failed", "not run"}.isdisjoint(states) else 1


def _run_in_turn(
    names: Sequence[str], settings: CheckSettings, give_up_at: float
) -> Iterator[tuple[str, Outcome]]:
    for name in names:
        reason = None if settings.smoke else busy_reason_after(_MEMORY_FREED_S)
        yield (
            name,
            _run(name, settings, give_up_at) if reason is None else not_run(reason),
        )


def _run_at_once(
    names: Sequence[str], settings: CheckSettings, give_up_at: float
) -> Iterator[tuple[str, Outcome]]:
    """In the order in which they end."""
    with ThreadPoolExecutor(len(names)) as threads:
        running = {
            threads.submit(_run, name, settings, give_up_at): name for name in names
        }
        for ended in as_completed(running):
            yield running[ended], ended.result()


def _run(name: str, settings: CheckSettings, give_up_at: float) -> Outcome:
    stage = STAGES[name]
    left_s = give_up_at - time.monotonic()
    least_s = _TOO_LITTLE_S if settings.smoke else stage.usual_s
    if left_s < least_s:
        return not_run(
            f"it takes about {stage.usual_s:.0f} s, {max(left_s, 0):.0f} s of --deadline are left"
        )
    deadline_s = stage.deadline_s * (_SMOKE_PATIENCE if settings.smoke else 1)
    return run_stage(stage, settings, min(deadline_s, left_s), _environment())


def _settings(options: argparse.Namespace) -> CheckSettings:
    return CheckSettings(
        out=options.out.resolve(),
        work=options.work.resolve(),
        smoke=bool(os.environ.get("SMOKE")),
        model=options.model,
        trained_model=options.trained_model,
    )


def _environment() -> dict[str, str]:
    """Of the stages: what they start can import the project, its tests and this
    package."""
    folders = [_PROJECT / "launch" / "gpu", _PROJECT, _PROJECT / "tests"]
    paths = [str(folder) for folder in folders]
    paths += [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _parser() -> argparse.ArgumentParser:
    work = Path(tempfile.gettempdir(), "gpu-check")
    described = "\n".join(
        f"  {stage.name:<11} {stage.proves}" for stage in STAGES.values()
    )
    parser = argparse.ArgumentParser(
        prog="python -m gpu_check",
        description=f"{__doc__}\nstages:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help="which, in this order (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=work,
        help="folder for gpu.json and logs (%(default)s)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=work,
        help="folder for models and runs (%(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="for all stages together",
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="run the stages side by side, which takes as long as the longest; their times then say nothing",
    )
    parser.add_argument(
        "--model",
        choices=("small", "half"),
        default="half",
        help="the random model (%(default)s)",
    )
    parser.add_argument(
        "--trained-model",
        type=Path,
        help="a model folder for the loop that can learn its task",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
