"""The held-out evaluations of a training run: before the first step, every
`eval.interval` steps, and after the last step; and what training gained. When those
between the first and the last step run: `run/loop/evaluation_schedule.py`. `invrl eval`
is `cli/commands/evaluate.py`."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from invrl.host.files.disk_waits import write_patiently
from invrl.observe.metrics.gains import GAINS_NAME, MeasuredGain
from invrl.observe.sinks.phases import observed_phase
from invrl.observe.sinks.sinks import RunObserver
from invrl.rollout.dispatch.evaluation import (
    EvalScore,
    Evaluation,
    failure_note,
    gain_interval,
)
from invrl.rollout.dispatch.rollout_handle import RolloutHandle
from invrl.run.loop.evaluation_schedule import EvaluationPlace
from invrl.run.loop.failed_rollouts import EvaluationFailures, command_for_failures
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder
from invrl.types.rollouts import Outcome
from invrl.types.weights import WeightVersion


def evaluation_place(config: Config) -> EvaluationPlace:
    """Return when the evaluations between the first and the last step run. Engines
    that share their GPUs with the trainer must have ended them before it trains. With
    `max_staleness` 0 nothing is generated while weights are updated."""
    if config.run.colocate:
        return "alone"
    if config.buffer.max_staleness == 0:
        return "one_version"
    return "beside"


@dataclass(slots=True)
class CountedTasks:
    """Tasks of an evaluation, counted while their failures are watched."""

    failures: EvaluationFailures
    planned: int = 0
    ended_tasks: int = 0

    def plan(self, tasks: int) -> None:
        """Begin an evaluation of `tasks` tasks."""
        self.planned = tasks
        self.ended_tasks = 0

    def began(self, group_id: str) -> None:
        self.failures.began(group_id)

    def ended(self, group_id: str, outcomes: list[Outcome]) -> None:
        self.ended_tasks += 1
        self.failures.ended(group_id, outcomes)

    async def text(self) -> str:
        return (
            f"{self.ended_tasks} of {self.planned} held-out tasks"
            if self.planned
            else ""
        )


class HeldOutEvaluations:
    """Evaluations of one incarnation. Every evaluation warns of failed rollouts."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        rollouts: RolloutHandle,
        observer: RunObserver,
    ) -> None:
        self._before_path: Path = folder.report_path / "evaluation-before.json"
        self._gains_path: Path = folder.report_path / GAINS_NAME
        self._rollouts = rollouts
        self._observer = observer
        self.tasks = CountedTasks(
            EvaluationFailures(
                at_start=config.buffer.failures.max_at_start or 0,
                rules=config.buffer.failures.rules(),
                warn=observer.note,
                show_all=command_for_failures(folder, held_out=True),
            )
        )
        """Tasks of the current or last evaluation."""

    async def before_training(self, first_step: int) -> Evaluation | None:
        """Return the evaluation before step 1. It is made once in a run: later
        incarnations read it back. None if its file is lost."""
        path = self._before_path
        try:
            if path.exists():
                return msgspec.json.decode(path.read_bytes(), type=Evaluation)
        except msgspec.MsgspecError as error:
            self._observer.note(
                f"{path} is damaged ({error}): nothing to compare the end with"
            )
            return None
        if first_step:
            self._observer.note(f"{path} is missing: nothing to compare the end with")
            return None
        evaluation = await self.evaluate(0)
        await write_patiently(path, msgspec.json.encode(evaluation).decode())
        return evaluation

    async def during_training(self, version: WeightVersion) -> Mapping[str, float]:
        """Return the metric values of an evaluation between the first and the last
        step."""
        evaluation = await self._rollouts.evaluate(
            version, watch=self.tasks, planned=self.tasks.plan
        )
        self._note_failures(evaluation)
        # its bootstrap intervals take a while
        return await asyncio.to_thread(evaluation.values)

    async def evaluate(self, step: int) -> Evaluation:
        """Evaluate after `step`, and write the result into the metrics."""
        with observed_phase(self._observer, "evaluating", step):
            evaluation = await self._rollouts.evaluate(
                step, watch=self.tasks, planned=self.tasks.plan
            )
        self._note_failures(evaluation)
        self._observer.step(step, await asyncio.to_thread(evaluation.values))
        return evaluation

    def _note_failures(self, evaluation: Evaluation) -> None:
        for score in evaluation.scores.values():
            if score.failures:
                self._observer.note(f"held-out tasks, {failure_note(score)}")

    async def report_gain(self, before: Evaluation, after: Evaluation) -> None:
        """Report one line per set and mode on the console, and all of them in the
        report folder."""
        gains = await asyncio.to_thread(self._note_gains, before, after)
        await write_patiently(self._gains_path, msgspec.json.encode(gains).decode())

    def _note_gains(self, before: Evaluation, after: Evaluation) -> list[MeasuredGain]:
        """Compute the gains' intervals, which takes a while, and report them."""
        gains: list[MeasuredGain] = []
        for name, score_after in after.scores.items():
            score_before = before.scores[name]
            gain = measured_gain(name, score_before, score_after)
            self._observer.note(describe_gain(gain, score_before, score_after))
            gains.append(gain)
        return gains


def measured_gain(name: str, before: EvalScore, after: EvalScore) -> MeasuredGain:
    """Return the gain between two scores of one set in one mode. Raises ValueError as
    `gain_interval` does."""
    gain = gain_interval(before, after)
    return MeasuredGain(
        name=name,
        tasks=len(after.task_ids),
        before=before.accuracy.value,
        after=after.accuracy.value,
        value=gain.value,
        low=gain.low,
        high=gain.high,
    )


def describe_gain(gain: MeasuredGain, before: EvalScore, after: EvalScore) -> str:
    return (
        f"held-out accuracy, {gain.name} ({_describe_size(after)}): {gain.before:.3f} -> {gain.after:.3f}, "
        f"gain {gain.value:+.3f}, 95 % interval [{gain.low:+.3f}, {gain.high:+.3f}]"
        f"{_describe_failures(before, 'before')}{_describe_failures(after, 'after')}"
    )


def _describe_size(score: EvalScore) -> str:
    """Describe the number of values behind an accuracy: each task may have been tried
    several times."""
    tasks = f"{len(score.task_ids):,} tasks"
    if score.samples == len(score.task_ids):
        return tasks
    return f"{tasks}, {score.samples:,} samples"


def _describe_failures(score: EvalScore, when: str) -> str:
    failed = sum(score.failures.values())
    if not failed:
        return ""
    return f"; {failed} of {score.samples} rollouts failed {when}"
