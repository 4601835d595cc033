"""`invrl eval`: a model measured on held-out tasks through the endpoint, without a trainer.

Engines, router, gateway and rollout workers are those of training. Invariant: `report/eval.json` is
written once every set has been measured, and every process has ended when `run_evaluation` returns.
Called by `cli.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy as np

from invrl.cluster import first_to_fail, model_folder, start_ray, start_serving
from invrl.config import Config
from invrl.rollout.evaluate import EvalScore, Interval, bootstrap_interval
from invrl.rollout.rollout_handle import Evaluator
from invrl.rollout.worker_handle import RayWorker
from invrl.run_folder import RunFolder

_PACKAGES = ("invrl", "sglang", "sglang-router", "transformers", "torch", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreReport:
    """One set in one mode."""

    set: str
    mode: str
    tasks: int
    samples_per_task: int
    mean_reward: Interval
    """Interval: bootstrap over tasks."""
    accuracy: Interval
    """Interval: Wilson's, over samples."""
    pass_at_k: Mapping[int, Interval]
    """Interval: bootstrap over tasks."""
    failures: Mapping[str, int]
    rewards: Mapping[str, tuple[float, ...]]
    """By task, one per sample."""

    @staticmethod
    def of(score: EvalScore) -> ScoreReport:
        return ScoreReport(
            set=score.set_name,
            mode=score.mode,
            tasks=len(score.task_ids),
            samples_per_task=len(score.rewards[0]),
            mean_reward=bootstrap_interval(np.array([np.mean(of_task) for of_task in score.rewards])),
            accuracy=score.accuracy,
            pass_at_k=score.pass_at_k,
            failures=score.failures,
            rewards=dict(zip(score.task_ids, score.rewards, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """`report/eval.json`."""

    model: str
    seconds: float
    """From the first rollout to the last."""
    versions: Mapping[str, str]
    """Of the packages that sample; one that is not installed is left out."""
    scores: tuple[ScoreReport, ...]
    config: Mapping[str, object]


def run_evaluation(config: Config, folder: RunFolder) -> None:
    """Raises InvrlError with the cause of an evaluation that could not be made."""
    asyncio.run(_evaluate(config, folder))


async def _evaluate(config: Config, folder: RunFolder) -> None:
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    note(f"starting {config.engine.num_engines} engine(s); run folder {folder.path}")
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(start_serving(config, folder))
        stack.enter_context(start_ray())
        evaluator = Evaluator(
            config.rollout,
            gateway_url=serving.gateway.url,
            env_key=serving.env_key,
            model=serving.settings.model_name,
            seed=config.run.seed,
            make_worker=partial(RayWorker, concurrency=config.rollout.rollout_concurrency),
        )
        stack.push_async_callback(evaluator.stop)
        await asyncio.gather(evaluator.start(), serving.wait_ready())
        await serving.fleet.admit()
        note("everything is up")
        ready = time.monotonic()
        done = evaluator.evaluate(lambda score: note(f"{score.name}: mean reward {score.mean_reward:.3f}"))
        evaluation = await first_to_fail(done, serving.watch())
        report = EvalReport(
            model=str(model_folder(config)),
            seconds=round(time.monotonic() - ready, 3),
            versions=_versions(),
            scores=tuple(ScoreReport.of(score) for score in evaluation.scores.values()),
            config=config.model_dump(mode="json"),
        )
        path = folder.report_path / "eval.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        print(f"\n{table(report.scores)}\n\n{path}", flush=True)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(scores: tuple[ScoreReport, ...]) -> str:
    """A line per measure, in columns."""
    rows = [("set", "mode", "tasks", "measure", "value", "95 % interval")]
    for score in scores:
        head = (score.set or "-", score.mode, f"{score.tasks} x {score.samples_per_task}")
        measures = {"mean reward": score.mean_reward, "accuracy": score.accuracy}
        measures |= {f"pass@{k}": share for k, share in score.pass_at_k.items()}
        for name, share in measures.items():
            rows.append((*head, name, f"{share.value:.3f}", f"[{share.low:.3f}, {share.high:.3f}]"))
        for reason, count in score.failures.items():
            rows.append((*head, f"failed: {reason}", str(count), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
