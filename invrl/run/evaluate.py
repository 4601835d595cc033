"""`invrl eval`: a model measured on held-out tasks through the endpoint, without a trainer.

Engines, router, gateway and rollout workers are those of training. Invariant: `report/eval.json` is written
once every set is measured; every process has ended when `run_evaluation` returns."""

import time
from collections.abc import Iterable
from importlib.metadata import version

import msgspec

from invrl import __version__
from invrl.host import interrupts
from invrl.host.printable import for_stdout
from invrl.rollout.dispatcher import first_to_fail
from invrl.rollout.evaluation import EvalScore, failure_note
from invrl.run.cluster import all_started, create_rollouts, start_serving
from invrl.run.config import Config
from invrl.run.failed_rollouts import EvaluationFailures
from invrl.run.ray_session import start_ray
from invrl.store.run_folder import RunFolder


async def run_evaluation(config: Config, folder: RunFolder) -> None:
    """Raises InvrlError with the cause of an evaluation that could not be made."""
    began = time.monotonic()

    def note(text: str) -> None:
        print(for_stdout(f"[{time.monotonic() - began:6.1f} s] {text}"), flush=True)

    note(f"starting {config.engine.num_engines} engine(s); run folder {folder.path}")
    async with interrupts.CleanUp() as stack:
        serving = await stack.enter_async_context(start_serving(config, folder))
        stack.enter_context(start_ray(config, folder.ray_logs_path))
        rollouts = create_rollouts(config, folder, serving)
        stack.push_async_callback(rollouts.stop)
        await all_started(rollouts.start(), serving.wait_ready())
        await serving.fleet.admit()
        note(f"everything is up; what your agent prints: {folder.printed_by_agents}")
        failures = EvaluationFailures(
            at_start=config.buffer.max_failures_at_start, rules=config.buffer.failure_rules(), warn=note
        )
        work = rollouts.evaluate(0, lambda score: note(score_note(score)), failures)
        evaluation = await first_to_fail(work, serving.watch())
        path = folder.report_path / "eval.json"
        path.write_bytes(report(config, evaluation.scores.values()))
        print(f"\n{table(evaluation.scores.values())}\n\n{path}", flush=True)


def score_note(score: EvalScore) -> str:
    """One line of a score as it comes, and what failed."""
    text = f"{score.name}: mean reward {score.mean_reward:.3f}"
    return f"{text}; {failure_note(score)}" if score.failures else text


def report(config: Config, scores: Iterable[EvalScore]) -> bytes:
    """`report/eval.json`: what was measured with its 95 % intervals, each task's rewards, and of what."""
    packages = ("sglang", "sglang-router", "transformers", "torch", "ray")
    rows = [
        {
            "set": score.set_name,
            "mode": score.mode,
            "tasks": len(score.task_ids),
            "samples": score.samples,
            **score.measures,
            "failures": score.failures,
            "rewards": dict(zip(score.task_ids, score.rewards, strict=True)),
        }
        for score in scores
    ]
    versions = {"invrl": __version__} | {name: version(name) for name in packages}
    content = {"model": str(config.model.folder), "scores": rows, "versions": versions}
    content["config"] = config.model_dump(mode="json")
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def table(scores: Iterable[EvalScore]) -> str:
    """A line per measure and per reason of failure, in columns."""
    rows = [("set", "mode", "tasks", "samples", "measure", "value", "95 % interval")]
    for score in scores:
        head = (score.set_name or "-", score.mode, str(len(score.task_ids)), str(score.samples))
        for name, found in score.measures.items():
            rows.append((*head, name, f"{found.value:.3f}", f"[{found.low:.3f}, {found.high:.3f}]"))
        rows += [(*head, f"failed: {reason}", str(count), "") for reason, count in score.failures.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
