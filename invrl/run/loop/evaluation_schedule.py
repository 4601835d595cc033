"""When the held-out evaluations between the first and the last step run.

    beside       during the following steps; their weight updates may change the version
    one_version  during the following step, whose weight update waits for it
    alone        before the following step

Invariant: at most one evaluation runs, and none is skipped. If one is due while another
runs, the loop waits for the earlier one. An evaluation that the end of the incarnation
cuts off is repeated by the next one, with the weights from which that one resumes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

from invrl.observe.sinks.phases import report_span
from invrl.observe.sinks.sinks import Sink
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.store.metrics_file import MetricsRow
from invrl.types.weights import WeightVersion

T = TypeVar("T")
EvaluationPlace = Literal["beside", "one_version", "alone"]
Measure = Callable[[WeightVersion], Awaitable[Mapping[str, float]]]
"""Measures the engines' weights, which have this version at the start. Returns flat
metric values."""
_PHASE = "evaluating"


class EvaluationSchedule:
    """Evaluates after every `interval` steps, except after step `num_steps`. The values
    are reported with the step after which the evaluation began."""

    def __init__(
        self,
        measure: Measure,
        observer: Sink,
        *,
        interval: int,
        num_steps: int,
        place: EvaluationPlace,
    ) -> None:
        self._measure = measure
        self._observer = observer
        self._interval = interval
        self._num_steps = num_steps
        self._place = place
        self._running: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._has_noted_wait = False
        self._step: int | None = None
        """Step whose evaluation runs."""

    def step_in_evaluation(self) -> int | None:
        """Return the step whose evaluation runs. It ends once its values are
        reported."""
        return self._step

    async def guard(
        self,
        steps: Callable[[], Awaitable[T]],
        *,
        done: int = 0,
        rows: Sequence[MetricsRow] = (),
    ) -> T:
        """Make the steps, and return their result once the last evaluation has ended.
        If an evaluation fails first, raise its error. No evaluation runs afterwards.
        `done`: step from which the run resumes. An evaluation that the earlier
        incarnation did not end, because `rows` has no values of it, is repeated."""
        try:
            if self._was_interrupted(done, rows):
                await self._begin(done)
            result = await first_to_fail(steps(), self._watch())
            await self._finish(self._step or 0)
            return result
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running})

    def _was_interrupted(self, done: int, rows: Sequence[MetricsRow]) -> bool:
        newest_due = done - done % self._interval
        is_measured = any(
            (row["step"] or 0) >= newest_due
            and any(name.startswith("eval/") for name in row)
            for row in rows
        )
        return 0 < newest_due <= done < self._num_steps and not is_measured

    async def after_step(self, step: int) -> None:
        """Begin the evaluation that is due after this step, if one is."""
        if step % self._interval or step >= self._num_steps:
            return
        if self._step is not None and not self._has_noted_wait:
            self._has_noted_wait = True
            self._observer.note(
                f"step {step}: training waits for the evaluation that began after step {self._step}; "
                "a larger --eval.interval or fewer --eval.tasks avoid that"
            )
        await self._finish(step)
        await self._begin(step)

    async def before_update(self, step: int) -> None:
        """Wait, where a weight update must not change the version that is
        evaluated."""
        if self._place == "one_version":
            await self._finish(step)

    async def _begin(self, step: int) -> None:
        self._step = step
        self._running = asyncio.create_task(self._evaluate(step))
        self._running.add_done_callback(self._note_failure)
        if self._place == "alone":
            await self._finish(step)

    async def _evaluate(self, step: int) -> None:
        began = time.monotonic()
        try:
            values = await self._measure(WeightVersion(step))
        finally:
            report_span(self._observer, _PHASE, step, began=began)
        self._observer.step(step, values)
        self._step = None

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed.set()

    async def _watch(self) -> None:
        """Raise the error of the evaluation that fails. Never returns."""
        await self._failed.wait()
        assert self._running is not None
        await self._running

    async def _finish(self, step: int) -> None:
        """Wait for the running evaluation, if there is one, as a phase of this step."""
        if self._running is None:
            return
        if not self._running.done():
            self._observer.phase(_PHASE, step)
        await asyncio.shield(self._running)
        self._running = None
