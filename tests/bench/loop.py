"""`invrl bench loop`: the loop's ratios, measured in one run; JSON, a history, and a flag for each that fell.

Three parts, one after the other: the rollout half beside the engine alone, the trainer beside Hugging Face,
and a short training run. Called by `cli.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tiny_model import make_tiny_model

from bench.ratios import TARGETS, Entry, Speeds, append_history, falls, missed, read_history
from invrl.batch_file import save_batch
from invrl.config import resolve
from invrl.flags import parse_flags
from invrl.ray_setup import prepare_ray
from invrl.run_folder import make_run_folder

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
PARTS = ("rollouts", "trainer", "run")


def main(arguments: Sequence[str]) -> int:
    """0; 1 if a ratio fell."""
    options = _options(arguments)
    work = Path(tempfile.mkdtemp(prefix="invrl-bench-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))  # the smoke run's rollout function; an installed clone has it anyway
    if options.smoke:
        options.model_path = str(make_tiny_model(work / "tiny"))
    result: dict[str, Any] = {
        **asdict(_entry(options.model_path if not options.smoke else "tiny", {})),
        "load_before": round(os.getloadavg()[0], 2),
        "repetitions": options.repetitions,
    }
    ratios, details = _measure(options, work)
    result |= {"ratios": ratios, "targets": TARGETS, "missed": missed(ratios), **details}
    entry = Entry(**{name: result[name] for name in Entry.__slots__})
    fell = falls(entry, read_history(options.results / "history.jsonl") if options.results else [])
    result["fell"] = [asdict(one) for one in fell]
    text = json.dumps(result, indent=2) + "\n"
    if options.results:
        append_history(options.results / "history.jsonl", entry)
        if options.baseline:
            (options.results / "baseline.json").write_text(text)
    if options.out:
        options.out.write_text(text)
    shutil.rmtree(work)
    print(text, end="")
    for name, value in ratios.items():
        verdict = "  MISSED" if name in result["missed"] else ""
        print(f"{name:<18}{value:6.3f}   target {TARGETS[name]:.2f}{verdict}")
    for one in fell:
        print(f"FELL: {one}", file=sys.stderr)
    return 1 if fell else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="invrl bench loop")
    parser.add_argument("--model-path", default="", help="model folder (SmolLM2; --smoke has its own)")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model: does the bench work?")
    parser.add_argument("--repetitions", type=int, default=0, help="of each pair (3; smoke: 2)")
    parser.add_argument("--only", choices=PARTS, default="", help="one part; nothing is compared or kept")
    parser.add_argument(
        "--results", type=Path, help="folder of the history (not with --smoke: tests/bench/results)"
    )
    parser.add_argument("--baseline", action="store_true", help="write baseline.json there as well")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    options = parser.parse_args(arguments)
    if not options.smoke and not options.model_path:
        parser.error("give --model-path FOLDER, or --smoke")
    options.repetitions = options.repetitions or (2 if options.smoke else 3)
    if options.only:
        options.results = None
    elif options.results is None and not options.smoke:
        options.results = RESULTS
    return options


def _measure(options: argparse.Namespace, work: Path) -> tuple[dict[str, float], dict[str, Any]]:
    parts = [options.only] if options.only else list(PARTS)
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {"speeds": {}}
    preset = "tests/e2e/trivial.toml" if options.smoke else "launch/configs/quickstart.toml"
    shared = ["--config", str(ROOT / preset), "--model-path", str(options.model_path), "--eval-tasks", "0"]
    shared += ["--run-root", str(work), "--no-tensorboard"]
    if "rollouts" in parts or "trainer" in parts:
        speeds = _measure_halves(options, work, shared, trainer="trainer" in parts)
        details["speeds"] = {name: one.summary() for name, one in speeds.items()}
        ratios |= {name: summary["ratio"] for name, summary in details["speeds"].items()}
    if "run" in parts:
        from bench.live_run import measure_run

        steps = "4" if options.smoke else "7"
        details["run"] = measure_run([*shared, "--run-name", "live", "--num-steps", steps], work)
        ratios["busy_share"] = details["run"]["time"]["busy_share"]
    return ratios, details


def _measure_halves(
    options: argparse.Namespace, work: Path, shared: Sequence[str], *, trainer: bool
) -> dict[str, Speeds]:
    """The rollout half; its last batch is what the trainer trains."""
    prepare_ray()
    from bench.rollouts import measure_rollouts

    # Twice as many rollouts in a batch as run at a time.
    flags = [*shared, "--run-name", "rollouts", "--debug-rollout-only", "--rollout-batch-size", "8"]
    config = resolve(*parse_flags(flags))
    folder = make_run_folder(config)
    count = 1 if options.only == "trainer" else options.repetitions
    tokens = 8 if options.smoke else 48
    speeds, batch = asyncio.run(measure_rollouts(config, folder, repetitions=count, new_tokens=tokens))
    if not trainer:
        return speeds
    save_batch(work / "batch.npz", batch)
    out = work / "trainer.json"
    command = [sys.executable, "-m", "bench.trainer", str(folder.config_path), str(work / "batch.npz")]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [*command, str(options.repetitions), str(out)], check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    found = {name: Speeds(**one) for name, one in json.loads(out.read_text()).items()}
    return found if options.only == "trainer" else speeds | found


def _entry(model: str, ratios: dict[str, float]) -> Entry:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else "unknown CPU"
    return Entry(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=f"{os.cpu_count()} x {cpu}",
        model=Path(model).name,
        ratios=ratios,
    )
