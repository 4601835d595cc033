"""`python -m benchmarks.loop`: the loop's ratios, measured in one run; JSON, a history,
and a flag for each that fell.

Three parts, one after the other: the rollout half beside the engine alone, the trainer
beside Hugging Face, and a short training run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tiny_model import make_tiny_model

from benchmarks import ROOT
from benchmarks.ratios import TARGETS, Speeds
from benchmarks.record import RESULTS, add_options, keep
from invrl.cli.flags import parse_flags
from invrl.host.processes.environment_keys import hold_keys
from invrl.host.ray.ray_setup import prepare_ray
from invrl.run.settings.config import resolve
from invrl.run.settings.folder import make_run_folder
from invrl.store.batch_file import save_batch

PARTS = ("rollouts", "trainer", "run")


def main(arguments: Sequence[str]) -> int:
    """0; 1 if a ratio fell."""
    options = _options(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    load_before = round(os.getloadavg()[0], 2)
    with TemporaryDirectory(prefix="invrl-bench-") as folder:
        work = Path(folder)
        if options.smoke:
            options.model_path = str(make_tiny_model(work / "tiny"))
        ratios, details = _measure(options, work)
    model = "tiny" if options.smoke else Path(options.model_path).name
    kept = {
        "options": options,
        "model": model,
        "baseline": "baseline.json",
        "load_before": load_before,
    }
    return keep(ratios, TARGETS, details, **kept)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop")
    parser.add_argument(
        "--model-path", default="", help="model folder (SmolLM2; --smoke has its own)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny random model: does the bench work?"
    )
    parser.add_argument(
        "--repetitions", type=int, default=0, help="of each pair (3; smoke: 2)"
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        default="",
        help="one part; nothing is compared or kept",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    if not options.smoke and not options.model_path:
        parser.error("give --model-path FOLDER, or --smoke")
    options.repetitions = options.repetitions or (2 if options.smoke else 3)
    if options.only:
        options.results = None
    elif options.results is None and not options.smoke:
        options.results = RESULTS
    return options


def _measure(
    options: argparse.Namespace, work: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    parts = [options.only] if options.only else list(PARTS)
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {"speeds": {}}
    preset = (
        "tests/e2e/trivial.toml" if options.smoke else "invrl/presets/quickstart.toml"
    )
    shared = [
        "--config",
        str(ROOT / preset),
        "--model-path",
        str(options.model_path),
        "--no-eval.tasks",
    ]
    shared += ["--run-root", str(work), "--no-metrics.tensorboard"]
    if "rollouts" in parts or "trainer" in parts:
        speeds = _measure_halves(options, work, shared, trainer="trainer" in parts)
        details["speeds"] = {name: speed.summary() for name, speed in speeds.items()}
        ratios |= {
            name: summary["ratio"] for name, summary in details["speeds"].items()
        }
    if "run" in parts:
        from benchmarks.live_run import measure_run

        steps = "4" if options.smoke else "7"
        details["run"] = measure_run(
            [*shared, "--run-name", "live", "--num-steps", steps], work
        )
        ratios["busy_share"] = details["run"]["time"]["busy_share"]
    return ratios, details


def _measure_halves(
    options: argparse.Namespace, work: Path, shared: Sequence[str], *, trainer: bool
) -> dict[str, Speeds]:
    """The rollout half; its last batch is what the trainer trains."""
    prepare_ray()
    from benchmarks.rollouts import measure_rollouts

    # Twice as many rollouts in a batch as run at a time.
    flags = [
        *shared,
        "--run-name",
        "rollouts",
        "--debug-rollout-only",
        "--rollout-batch-size",
        "8",
    ]
    config = resolve(*parse_flags(flags))
    folder = make_run_folder(config)
    count = 1 if options.only == "trainer" else options.repetitions
    tokens = 8 if options.smoke else 48
    speeds, batch = asyncio.run(
        measure_rollouts(config, folder, repetitions=count, new_tokens=tokens)
    )
    if not trainer:
        return speeds
    save_batch(work / "step.batch", batch)
    out = work / "trainer.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training.recorded_batch",
        str(folder.config_path),
        str(work / "step.batch"),
    ]
    paths = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    subprocess.run(
        [*command, str(options.repetitions), str(out)],
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    found = {name: Speeds(**one) for name, one in json.loads(out.read_text()).items()}
    return found if options.only == "trainer" else speeds | found


if __name__ == "__main__":
    hold_keys()
    sys.exit(main(sys.argv[1:]))
