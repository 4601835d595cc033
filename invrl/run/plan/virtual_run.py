"""A run on a clock that jumps: the real loop, dispatcher and buffer; engines that only
take time, a trainer that only sleeps."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.errors import DeadlineError
from invrl.interfaces import StepResult
from invrl.observe.sinks.sinks import Sink
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.dispatcher import Dispatcher
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import Assignment
from invrl.rollout.workers.worker_pool import WorkerPool
from invrl.run.loop.evaluation_schedule import EvaluationSchedule
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.run.plan.paced_engine import PacedEngine
from invrl.run.plan.workload import Workload
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.fields import field_values
from invrl.types.file_entry import FileEntries
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease
from invrl.types.metrics import Metric
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task
from invrl.types.weights import WeightUpdate, WeightVersion


@dataclass(slots=True, eq=False)
class VirtualRun:
    """Made inside of an event loop whose clock jumps."""

    workload: Workload
    config: BufferConfig
    observer: Sink = field(default_factory=Sink)
    batches: list[TakenBatch] = field(default_factory=list)
    """Trained batches."""
    engine: PacedEngine = field(init=False)
    buffer: GroupBuffer = field(init=False)
    version: WeightVersion = field(init=False)
    """The version under which the engines sample."""

    def __post_init__(self) -> None:
        self.version = WeightVersion(0)
        self.engine = PacedEngine(self.workload)
        self.buffer = GroupBuffer(
            self.config,
            RolloutConfig.model_validate(
                {
                    "rollout_batch_size": self.workload.groups,
                    "n_samples_per_prompt": self.workload.group_size,
                }
            ),
            tasks=(Task(id=f"t{number}", payload={}) for number in itertools.count()),
            group_filter=lambda group: None,
        )

    async def make_steps(
        self, num_steps: int, evaluations: EvaluationSchedule | None = None
    ) -> float:
        """Return the seconds that the steps took."""
        buffer = _LocalBuffer(self.buffer)
        dispatcher = Dispatcher(
            buffer,
            cast(SessionClient, _OpenedAtOnce()),
            cast(WorkerPool, cast(Any, _PacedRollouts(self, buffer))),
            concurrency=self.workload.slots,
            group_form=False,
        )
        learner = Learner(
            trainer=_SleepingTrainer(self.workload.training_s),
            sync=self._sync,
            save=_save_nothing,
        )
        parts = Parts(
            buffer=buffer,
            assemble=self._assemble,
            observer=self.observer,
            learner=learner,
            evaluations=evaluations,
        )
        dispatcher.start()
        steps = partial(run_loop, parts, done=0, num_steps=num_steps)
        if evaluations is not None:
            steps = partial(evaluations.guard, steps)
        await dispatcher.guard(steps())
        seconds = asyncio.get_running_loop().time()
        await dispatcher.stop()
        return seconds

    async def _sync(self, version: WeightVersion) -> WeightUpdate:
        await asyncio.sleep(self.workload.update_s)
        self.version = version
        return WeightUpdate(
            version=version,
            num_bytes=0,
            seconds={},
            canary_max_gap=0.0,
            canary_mean_gap=0.0,
        )

    def _assemble(self, step: int, taken: TakenBatch) -> TrainBatch:
        self.batches.append(taken)
        return TrainBatch(
            batch_id=taken.batch_id, version=taken.version, samples=(), advantages=()
        )


class _LocalBuffer:
    """The buffer without its process and its store."""

    def __init__(self, state: GroupBuffer) -> None:
        self._state = state
        self._changed = asyncio.Condition()

    async def lease(self) -> GroupLease | None:
        """Wait for a lease: on a clock that jumps, to ask again and again for one takes
        a fifth of a run's computing time."""
        async with self._changed:
            while (lease := self._state.lease()) is None:
                await self._changed.wait()
            return lease

    async def record(self, outcome: Outcome) -> None:
        self._state.record(outcome)
        await self._notify()

    async def unwanted(self) -> Sequence[DroppedGroup]:
        async with self._changed:
            await self._changed.wait()
            return self._state.unwanted()

    async def take(self) -> TakenBatch:
        async with self._changed:
            while (batch := self._state.take()) is None:
                if not self._state.can_fill:
                    raise DeadlineError(f"a batch of {self._state}", 0.0)
                await self._changed.wait()
            self._changed.notify_all()
            return batch

    async def trained(self, batch_id: int) -> None:
        self._state.trained(batch_id)

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return b""

    async def advance(self, version: WeightVersion) -> None:
        self._state.advance(version)
        await self._notify()

    async def metrics(self) -> Mapping[str, Metric]:
        return self._state.metrics()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _OpenedAtOnce:
    """Sessions without a gateway."""

    async def open(
        self, lease: GroupLease, *, deadline_s: float | None = None
    ) -> list[Session]:
        return [
            Session(
                id=f"{lease.group_id}.{member.index}.{member.attempt}",
                key="",
                base_url="",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=member.index,
                attempt=member.attempt,
                purpose="train",
                sampling=Sampling(),
            )
            for member in lease.members
        ]

    async def abort(
        self, session: Session, reason: FailureReason, detail: str
    ) -> None: ...


class _PacedRollouts:
    """Runs each session as one request to the engines."""

    def __init__(self, run: VirtualRun, buffer: _LocalBuffer) -> None:
        self._run = run
        self._buffer = buffer

    async def run(self, assignment: Assignment, dropped: asyncio.Event) -> tuple[()]:
        (session,) = assignment.sessions
        run = self._run
        number = int(session.group_id.removeprefix("g"))
        length = run.workload.lengths.of_group(number)[session.index]
        oldest = run.version
        started_at = asyncio.get_running_loop().time()
        generation = asyncio.ensure_future(run.engine.generate(length))
        drop = asyncio.ensure_future(dropped.wait())
        try:
            await asyncio.wait({generation, drop}, return_when=asyncio.FIRST_COMPLETED)
            has_ended = generation.done()
        finally:
            generation.cancel()
            drop.cancel()
            await asyncio.gather(generation, drop, return_exceptions=True)
        if has_ended:
            outcome = _finished(
                session,
                length,
                oldest=oldest,
                newest=run.version,
                started_at=started_at,
            )
        else:
            outcome = FailedRollout(
                **field_values(session.identity),
                reason=FailureReason.GROUP_DROPPED,
                detail="",
            )
        await self._buffer.record(outcome)
        return ()


def _finished(
    session: Session,
    length: float,
    *,
    oldest: WeightVersion,
    newest: WeightVersion,
    started_at: float,
) -> RolloutSummary:
    return RolloutSummary(
        **field_values(session.identity),
        reward=float(session.index % 2),
        num_turns=1,
        prompt_tokens=0,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=round(length),
        trained_tokens=round(length),
        truncated=False,
        oldest_version=oldest,
        newest_version=newest,
        forks=0,
        started_at=started_at,
        finished_at=asyncio.get_running_loop().time(),
    )


class _SleepingTrainer:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def train(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(self._seconds)
        return StepResult(optimizer_steps=1, nonfinite_steps=0, metrics={}, seconds={})

    async def save_checkpoint(self, path: str) -> FileEntries:
        return {}

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        return {}


async def _save_nothing(step: int, snapshot: bytes) -> None: ...
