"""`invrl eval`: measures a model on held-out tasks, without a trainer. The evaluations
within a training run are in `run/loop/held_out.py`.

Engines, router, gateway and rollout workers are those of training. Invariants:
`report/eval.json` is written once every set is measured; every process has ended when
`run_evaluation` returns. With the inner command that its supervisor starts as the
driver."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from invrl import __version__
from invrl.cli.arguments import read_run_folder
from invrl.cli.command import CommandFailed
from invrl.cli.next_commands import print_next
from invrl.cli.run_process import checked_configuration, driver_context, log_to_folder
from invrl.engines.router import smg
from invrl.host.files.disk_waits import watch_disks, write_patiently
from invrl.host.output.incidents import incidents_shown
from invrl.host.output.printable import printable
from invrl.host.output.wait_lines import print_waits
from invrl.host.processes import interrupts
from invrl.rollout.tasks.task_labels import guess_notes
from invrl.run.loop.failed_rollouts import EvaluationFailures, command_for_failures
from invrl.run.processes import supervisor
from invrl.run.processes.background import in_background
from invrl.run.processes.driver_commands import EVALUATION_COMMAND, USAGE_EXIT
from invrl.run.processes.phase_progress import StartingParts
from invrl.run.settings.config import Config
from invrl.run.settings.folder import hold_run_folder
from invrl.store.run_folder import RunFolder

if TYPE_CHECKING:
    from invrl.rollout.dispatch.evaluation import EvalScore


def evaluate(arguments: Sequence[str]) -> None:
    """usage: invrl eval --model-path FOLDER [--config FILE] [flags]

    Rollouts run through the gateway exactly as in training. Tasks: --eval.sets, or
    --task-file, or the split 'eval' of --task-source-path; --no-eval.tasks takes all of
    them. Prints a table (mean reward, accuracy, pass@k, 95 % intervals) and writes
    report/eval.json into the run folder.

    examples:
      invrl eval --model-path MODEL --config quickstart --eval.samples-per-task 8
      invrl eval --model-path runs/a/checkpoints/step-000012 \\
          --rollout-function-path my_agent:rollout \\
          --eval.sets easy=easy.jsonl,hard=my_tasks:hard --eval.modes sampled"""
    config = checked_configuration(arguments, command="eval")
    with hold_run_folder(config, "eval") as folder:
        log_to_folder(folder, config, process="supervisor")
        exit_code = supervisor.supervise_once(config, folder, EVALUATION_COMMAND)
        if exit_code != USAGE_EXIT:
            print_next(config, folder, finished=True)
        if exit_code:
            raise CommandFailed(exit_code)


def run_evaluation_in_folder(arguments: Sequence[str]) -> None:
    """usage: _evaluation RUN_FOLDER

    Runs the evaluation in this folder: the driver of `invrl eval`."""
    folder = read_run_folder(arguments)
    with driver_context(folder) as config:
        interrupts.run(run_evaluation(config, folder))


async def run_evaluation(config: Config, folder: RunFolder) -> None:
    """Evaluate, printing scores as they come and a table at the end. Raises InvrlError
    with the cause of a failure."""
    from invrl.engines.launch.engine_server import count_gpus
    from invrl.rollout.dispatch.dispatcher import first_to_fail
    from invrl.run.hosts.placement import engine_pool
    from invrl.run.processes.cluster import all_started, create_rollouts, join_ray
    from invrl.run.processes.gpu_plan import plan_engines
    from invrl.run.processes.ray_session import start_ray
    from invrl.run.processes.serving import start_serving
    from invrl.run.processes.tokenizer import keep_tokenizer

    started_at = time.monotonic()

    def note(text: str) -> None:
        seconds = time.monotonic() - started_at
        print(printable(f"[{seconds:6.1f} s] {text}"), flush=True)

    note(f"starting {config.engine.described}; run folder {folder.path}")
    gpus = plan_engines(config, count_gpus())
    if gpus is not None:
        note(f"GPUs: {gpus}")
    for sentence in guess_notes(config.rollout):
        note(f"note: {sentence}")
    keep_tokenizer(config, folder)
    starting = StartingParts()
    async with interrupts.CleanUp() as stack:
        stack.enter_context(incidents_shown(note))
        await stack.enter_async_context(in_background(watch_disks(folder.path)))
        placement = await join_ray(config, folder, starting, stack)
        hosts = engine_pool(config, placement)
        serving = await stack.enter_async_context(
            start_serving(config, folder, gpus=gpus, hosts=hosts)
        )
        with print_waits(starting.awaited):
            if placement is None:
                with starting.part("Ray"):
                    stack.enter_context(start_ray(config, folder.ray_logs_path))
            rollouts = create_rollouts(config, folder, serving, placement=placement)
            stack.push_async_callback(rollouts.stop)
            await all_started(
                starting.wait_until_up("rollout workers", rollouts.start()),
                starting.wait_until_up("engines", serving.wait_ready()),
            )
        await serving.fleet.check_unchanged()
        await serving.fleet.admit()
        serving.fleet.restart_evicted()
        note(
            f"everything is up behind {serving.fleet.router.program}; what your agent prints: "
            f"{folder.printed_by_agents}"
        )
        failures = EvaluationFailures(
            at_start=config.buffer.failures.max_at_start or 0,
            rules=config.buffer.failures.rules(),
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
    from invrl.rollout.dispatch.evaluation import failure_note

    text = f"{score.name}: mean reward {score.mean_reward:.3f}"
    if not score.failures:
        return text
    return f"{text}; {failure_note(score)}"


def report(config: Config, scores: Iterable[EvalScore]) -> bytes:
    """Return the content of `report/eval.json`: the measures with their 95 % intervals,
    the rewards of each task, and model, settings and versions."""
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
    versions = {"invrl": __version__}
    packages = ["sglang", "transformers", "torch", "ray"]
    if config.engine.router == "smg":
        versions["smg"] = smg.VERSION
    else:
        packages.append("sglang-router")
    versions |= {package: version(package) for package in packages}
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
