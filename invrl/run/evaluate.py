"""`invrl eval`: measures a model on held-out tasks, without a trainer. The evaluations
within a training run are in `held_out.py`.

Uses the engines, router, gateway and rollout workers of training. Invariants:
`report/eval.json` is written once every set is measured; every process has ended when
`run_evaluation` returns.
"""

import time
from collections.abc import Iterable
from importlib.metadata import version

import msgspec

from invrl import __version__
from invrl.engines import smg
from invrl.host import interrupts
from invrl.host.disk_waits import watch_disk, write_patiently
from invrl.host.incidents import incidents_shown
from invrl.host.printable import for_stdout
from invrl.host.wait_lines import tell_waits
from invrl.rollout.dispatcher import first_to_fail
from invrl.rollout.evaluation import EvalScore, failure_note
from invrl.rollout.task_labels import guess_notes
from invrl.run.awaited_work import PartsStarting
from invrl.run.background import in_background
from invrl.run.cluster import all_started, create_rollouts, start_serving
from invrl.run.config import Config
from invrl.run.failed_rollouts import EvaluationFailures, command_for_failures
from invrl.run.ray_session import start_ray
from invrl.run.tokenizer import keep_tokenizer
from invrl.store.run_folder import RunFolder


async def run_evaluation(config: Config, folder: RunFolder) -> None:
    """Evaluate, printing scores as they come and a table at the end. Raises InvrlError
    with the cause of a failure."""
    started_at = time.monotonic()

    def note(text: str) -> None:
        seconds = time.monotonic() - started_at
        print(for_stdout(f"[{seconds:6.1f} s] {text}"), flush=True)

    note(f"starting {config.engine.described}; run folder {folder.path}")
    for sentence in guess_notes(config.rollout):
        note(f"note: {sentence}")
    keep_tokenizer(config, folder)
    async with interrupts.CleanUp() as stack:
        stack.enter_context(incidents_shown(note))
        await stack.enter_async_context(in_background(watch_disk(folder.path)))
        serving = await stack.enter_async_context(start_serving(config, folder))
        starting = PartsStarting()
        with tell_waits(starting.awaited):
            with starting.part("Ray"):
                stack.enter_context(start_ray(config, folder.ray_logs_path))
            rollouts = create_rollouts(config, folder, serving)
            stack.push_async_callback(rollouts.stop)
            await all_started(
                starting.until_up("rollout workers", rollouts.start()),
                starting.until_up("engines", serving.wait_ready()),
            )
        await serving.fleet.check_unchanged()
        await serving.fleet.admit()
        serving.fleet.restart_evicted()
        note(
            f"everything is up behind {serving.fleet.router.program}; what your agent prints: "
            f"{folder.printed_by_agents}"
        )
        failures = EvaluationFailures(
            at_start=config.buffer.max_failures_at_start or 0,
            rules=config.buffer.failure_rules(),
            warn=note,
            show_all=command_for_failures(folder),
        )
        evaluating = rollouts.evaluate(
            0, lambda score: note(score_note(score)), failures
        )
        evaluation = await first_to_fail(evaluating, serving.watch())
        path = folder.report_path / "eval.json"
        content = report(config, evaluation.scores.values())
        await write_patiently(path, content.decode())
        print(f"\n{table(evaluation.scores.values())}\n\n{path}", flush=True)


def score_note(score: EvalScore) -> str:
    """Describe a score and its failed rollouts."""
    text = f"{score.name}: mean reward {score.mean_reward:.3f}"
    if not score.failures:
        return text
    return f"{text}; {failure_note(score)}"


def report(config: Config, scores: Iterable[EvalScore]) -> bytes:
    """Return the content of `report/eval.json`: the measures with their 95 % intervals,
    the rewards of each task, and model, settings and versions."""
    rows: list[dict[str, object]] = []
    for score in scores:
        row: dict[str, object] = {
            "set": score.set_name,
            "mode": score.mode,
            "tasks": len(score.task_ids),
            "samples": score.samples,
        }
        row.update(score.measures)
        row["failures"] = score.failures
        row["rewards"] = dict(zip(score.task_ids, score.rewards, strict=True))
        rows.append(row)
    versions = {"invrl": __version__}
    for package in ("sglang", "transformers", "torch", "ray"):
        versions[package] = version(package)
    if config.engine.router == "smg":
        versions["smg"] = smg.VERSION
    else:
        versions["sglang-router"] = version("sglang-router")
    content = {
        "model": str(config.model.folder),
        "scores": rows,
        "versions": versions,
        "config": config.model_dump(mode="json"),
    }
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def table(scores: Iterable[EvalScore]) -> str:
    """Return a line per measure and per reason of failure, in columns."""
    rows = [("set", "mode", "tasks", "samples", "measure", "value", "95 % interval")]
    for score in scores:
        evaluation = (
            score.set_name or "-",
            score.mode,
            str(len(score.task_ids)),
            str(score.samples),
        )
        for name, measure in score.measures.items():
            interval = f"[{measure.low:.3f}, {measure.high:.3f}]"
            rows.append((*evaluation, name, f"{measure.value:.3f}", interval))
        for reason, count in score.failures.items():
            rows.append((*evaluation, f"failed: {reason}", str(count), ""))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
