"""`invrl train` as a whole: gateway, router, engine, Ray, trainer, and weights by an
arena on the card.

With a model that can learn it, the quickstart's task; random weights learn to reply
with more vowels.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_check.log_tails import last_lines, print_tails
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings

STEPS = 6
_TASKS = 64
_DEADLINE_S = 160.0
_SMOKE_DEADLINE_S = 1500.0
_TAIL_LINES = 15
_CACHED_TOKENS = 1_000_000
"""Of an engine: 2 GB of the small model."""
_REPORTED = re.compile(
    r"rollout/reward_mean|sync/canary_mean_gap|train/(peak|estimated)_memory_gb|(time|sync)/\w+_s"
)
"""Of the names in `metrics.jsonl`."""
_FAILED = "failed_share/"


def run(settings: CheckSettings) -> None:
    train_and_check(settings, "loop", ())


def train_and_check(settings: CheckSettings, name: str, flags: Sequence[str]) -> None:
    """`name`: of the run's folder. Raises AssertionError unless all steps were made,
    each with its weights synced, and no rollout failed."""
    run_folder = settings.work / "runs" / f"{name}-{time.time_ns()}"
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "train",
        *_task_flags(settings),
        *_run_flags(settings),
    ]
    command += [
        "--run-root",
        str(run_folder.parent),
        "--run-name",
        run_folder.name,
        *flags,
    ]
    output = settings.out / f"{name}-train.txt"
    deadline_s = _SMOKE_DEADLINE_S if settings.smoke else _DEADLINE_S
    try:
        with output.open("w", encoding="utf-8") as file:
            subprocess.run(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=deadline_s,
            )
    except BaseException as error:
        # the deadline of the stage too, which ends this process
        print_tails(run_folder / "logs")
        print(
            "--- the end of `invrl train`",
            *last_lines(output, _TAIL_LINES),
            sep="\n",
            flush=True,
        )
        if isinstance(error, subprocess.SubprocessError):
            raise SystemExit(_describe_train_end(error, output)) from None
        raise
    finally:
        lines = _read_steps(run_folder)
        emit(
            run=str(run_folder),
            steps=len(lines),
            steps_of_run=[_figures(line) for line in lines],
        )
    rewards = [line["rollout/reward_mean"] for line in lines]
    versions = [line["sync/version"] for line in lines]
    third = STEPS // 3
    emit(learned=sum(rewards[-third:]) > sum(rewards[:third]), rewards=rewards)
    assert len(lines) == STEPS, f"{len(lines)} steps were made, not {STEPS}"
    assert len(set(versions)) == STEPS, (
        f"weights were not synced after every step: versions {versions}"
    )
    failed = {
        name
        for line in lines
        for name, value in line.items()
        if _FAILED in name and value > 0
    }
    assert not failed, f"rollouts failed: {', '.join(sorted(failed))}"


def _task_flags(settings: CheckSettings) -> list[str]:
    if settings.trained_model is not None:
        model = str(settings.trained_model)
        return ["--config", "quickstart", "--model-path", model, "--no-eval.tasks"]
    tasks = settings.work / "tasks.jsonl"
    lines = [
        json.dumps({"question": f"say {index}", "label": index})
        for index in range(_TASKS)
    ]
    tasks.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = {
        "model-path": str(random_model(settings, "small")),
        "task-file": str(tasks),
        "rollout-function-path": "gpu_check.vowels:rollout",
        "rollout-batch-size": "4",
        "n-samples-per-prompt": "8",
        "max-new-tokens": "32",
        "max-sample-tokens": "1024",
        "group-filter": "none",
        "lr": "1e-3",
    }
    return _as_arguments(flags)


def _run_flags(settings: CheckSettings) -> list[str]:
    flags = {"num-steps": str(STEPS), "log.progress": "plain"}
    if not settings.smoke:
        flags["weights.arena-device"] = "cuda"
        flags["engine.max-total-tokens"] = str(_CACHED_TOKENS)
    for name, value in settings.sglang_flags.items():
        flags[f"sglang-{name.replace('_', '-')}"] = value
    return _as_arguments(flags)


def _as_arguments(flags: dict[str, str]) -> list[str]:
    arguments: list[str] = []
    for name, value in flags.items():
        arguments += [f"--{name}", value]
    return arguments


def _read_steps(run_folder: Path) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl` that tell of a training step."""
    path = run_folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        line
        for line in lines
        if "rollout/reward_mean" in line and "sync/version" in line
    ]


def _figures(line: dict[str, float]) -> dict[str, float]:
    """Of a step: the reward, the gap of the canary, the trainer's memory, and seconds
    by phase."""
    return {
        name: round(value, 4)
        for name, value in line.items()
        if _REPORTED.fullmatch(name)
    }


def _describe_train_end(error: subprocess.SubprocessError, output: Path) -> str:
    said = [line for line in last_lines(output, _TAIL_LINES) if line.strip()] or [
        "it said nothing"
    ]
    if isinstance(error, subprocess.CalledProcessError):
        return f"`invrl train` exited with {error.returncode}: {said[-1]}"
    return f"`invrl train` did not end in time; it said last: {said[-1]}"
