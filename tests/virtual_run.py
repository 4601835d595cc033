"""A run on a jumping clock: the real loop, dispatcher and buffer; an engine that only
takes time, a trainer that only sleeps."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from jumping_clock import run_jumping
from loop_parts import Notes, assemble_nothing, save_nothing, sync_at_once
from small_buffer import failed, finished

from invrl.buffer.config import Admission, BufferConfig, WhenStale
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.errors import DeadlineError
from invrl.interfaces import StepResult
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.dispatcher import Dispatcher
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import Assignment
from invrl.rollout.workers.worker_pool import WorkerPool
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease, Place
from invrl.types.metrics import Metric
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import Outcome
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task
from invrl.types.weights import WeightUpdate, WeightVersion

MEAN_LENGTH = 400.0
"""Tokens of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths are lognormal; half of the variance of the logarithm is the task's."""

    groups: int = 16
    """Groups of a batch."""
    group_size: int = 8
    slots_per_rollout: float = 1.0
    """Concurrency over the rollouts of a batch."""
    sigma: float = 1.0
    token_s: float = 0.01
    """Seconds of an engine's step with one request."""
    request_s: float = 0.0002
    """Seconds that each further request adds to a step."""
    training_share: float = 1.0
    """Seconds of a training step over those in which the engine, with all slots in use,
    generates a batch."""
    seed: int = 0

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def slots(self) -> int:
        return max(1, round(self.slots_per_rollout * self.rollouts))

    def step_s(self, num_running: int) -> float:
        """Return the seconds of an engine's step, in which each request gets a
        token."""
        return self.token_s + self.request_s * num_running

    @property
    def packed_s(self) -> float:
        """Seconds in which the engine generates a batch of mean lengths while all slots
        are in use."""
        return self.rollouts * MEAN_LENGTH * self.step_s(self.slots) / self.slots

    @property
    def training_s(self) -> float:
        return self.training_share * self.packed_s

    def lengths_G(self, group_number: int) -> list[int]:
        """Return the lengths of a group's rollouts, in tokens."""
        random = np.random.default_rng((self.seed, group_number))
        deviation = self.sigma / math.sqrt(2)
        of_task, of_rollouts_G = (
            random.normal(0, deviation),
            random.normal(0, deviation, self.group_size),
        )
        logarithms_G = math.log(MEAN_LENGTH) - self.sigma**2 / 2 + of_task
        return [
            max(1, round(length))
            for length in np.exp(logarithms_G + of_rollouts_G).tolist()
        ]


class PacedEngine:
    """All running requests get their tokens at the same pace, which depends on their
    number."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._loop = asyncio.get_running_loop()
        self._tokens = 0.0
        """Tokens that a request has which runs since the start."""
        self._seen_at = self._loop.time()
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.num_running = 0

    async def generate(self, num_tokens: int) -> None:
        self._catch_up()
        ended = self._loop.create_future()
        self.num_running += 1
        heapq.heappush(
            self._ends, (self._tokens + num_tokens, next(self._numbers), ended)
        )
        self._set_timer()
        try:
            await ended
        finally:
            self._catch_up()
            self.num_running -= 1
            self._set_timer()

    def _catch_up(self) -> None:
        now = self._loop.time()
        if self.num_running:
            step_s = self._workload.step_s(self.num_running)
            self._tokens += (now - self._seen_at) / step_s
        self._seen_at = now

    def _set_timer(self) -> None:
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and self.num_running:
            steps = max(0.0, self._ends[0][0] - self._tokens)
            seconds = steps * self._workload.step_s(self.num_running)
            self._timer = self._loop.call_later(seconds, self._end_first)

    def _end_first(self) -> None:
        self._catch_up()
        if self._ends:
            tokens, _, ended = heapq.heappop(self._ends)
            self._tokens = max(self._tokens, tokens)
            if not ended.done():
                ended.set_result(None)
        self._set_timer()


class LocalBuffer:
    """The buffer without its process and its store."""

    def __init__(self, buffer: GroupBuffer) -> None:
        self.state = buffer
        self._changed = asyncio.Condition()

    async def lease(self) -> GroupLease | None:
        return self.state.lease()

    async def record(self, outcome: Outcome) -> None:
        self.state.record(outcome)
        await self._notify()

    async def unwanted(self) -> Sequence[DroppedGroup]:
        async with self._changed:
            await self._changed.wait()
            return self.state.unwanted()

    async def take(self) -> TakenBatch:
        async with self._changed:
            while (batch := self.state.take()) is None:
                if not self.state.can_fill:
                    raise DeadlineError(f"a batch of {self.state}", 0.0)
                await self._changed.wait()
            return batch

    async def trained(self, batch_id: int) -> None:
        self.state.trained(batch_id)

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return b""

    async def advance(self, version: WeightVersion) -> None:
        self.state.advance(version)
        await self._notify()

    async def metrics(self) -> Mapping[str, Metric]:
        return self.state.metrics()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class OpenedAtOnce:
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


@dataclass(slots=True)
class PacedRollouts:
    """Runs each session as one request to the engine."""

    workload: Workload
    engine: PacedEngine
    buffer: LocalBuffer
    version: WeightVersion
    """The version under which the engine samples."""
    lengths: dict[Place, int] = field(default_factory=dict)

    async def run(self, assignment: Assignment, dropped: asyncio.Event) -> tuple[()]:
        (session,) = assignment.sessions
        place = Place(session.group_id, session.index, session.attempt)
        group_number = int(session.group_id.removeprefix("g"))
        length = self.workload.lengths_G(group_number)[session.index]
        self.lengths[place] = length
        began_under = self.version
        generation = asyncio.ensure_future(self.engine.generate(length))
        drop = asyncio.ensure_future(dropped.wait())
        await asyncio.wait({generation, drop}, return_when=asyncio.FIRST_COMPLETED)
        if generation.done():
            outcome: Outcome = finished(
                place,
                reward=float(session.index % 2),
                oldest=began_under,
                newest=self.version,
                tokens=length,
            )
        else:
            outcome = failed(place, FailureReason.GROUP_DROPPED)
        for task in (generation, drop):
            task.cancel()
        await asyncio.gather(generation, drop, return_exceptions=True)
        await self.buffer.record(outcome)
        return ()


class SleepingTrainer:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualResult:
    seconds: float
    trained_tokens: int
    trained_lengths: list[int]
    asked_lengths: list[int]
    """Of the rollouts of all groups up to the first one that has not ended."""
    trained_of_asked: list[int]
    """Those of them that were trained."""
    ages: list[int]
    """Of the trained rollouts' oldest tokens, in versions."""

    @property
    def length_ratio(self) -> float:
        """Mean length of what was trained over that of what was asked for."""
        return float(np.mean(self.trained_of_asked) / np.mean(self.asked_lengths))


def virtual_run(
    workload: Workload,
    *,
    num_steps: int,
    max_staleness: int,
    when_stale: WhenStale = "train",
    admission: Admission = "groups",
    over_sampling_groups: int = 0,
) -> VirtualResult:
    config = BufferConfig(
        max_staleness=max_staleness,
        when_stale=when_stale,
        admission=admission,
        over_sampling_groups=over_sampling_groups,
        group_filter="none",
    )
    return run_jumping(_run(workload, config, num_steps))


async def _run(
    workload: Workload, config: BufferConfig, num_steps: int
) -> VirtualResult:
    tasks = (Task(id=f"t{number}", payload={}) for number in itertools.count())
    buffer = LocalBuffer(
        GroupBuffer(
            config,
            RolloutConfig(
                rollout_batch_size=workload.groups,
                n_samples_per_prompt=workload.group_size,
            ),
            tasks=tasks,
            group_filter=lambda group: None,
        )
    )
    rollouts = PacedRollouts(workload, PacedEngine(workload), buffer, WeightVersion(0))
    dispatcher = Dispatcher(
        buffer,
        cast(SessionClient, OpenedAtOnce()),
        cast(WorkerPool, cast(Any, rollouts)),
        concurrency=workload.slots,
        group_form=False,
    )
    trained: dict[Place, int] = {}
    ages: list[int] = []

    async def sync(version: WeightVersion) -> WeightUpdate:
        rollouts.version = version
        return await sync_at_once(version)

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        for group in taken.groups:
            for rollout in group.rollouts_G:
                place = Place(group.id, rollout.index, rollout.attempt)
                trained[place] = rollout.sampled_tokens
                ages.append(taken.version - rollout.oldest_version)
        return assemble_nothing(step, taken)

    learner = Learner(
        trainer=SleepingTrainer(workload.training_s), sync=sync, save=save_nothing
    )
    parts = Parts(buffer=buffer, assemble=assemble, observer=Notes(), learner=learner)
    dispatcher.start()
    await dispatcher.guard(run_loop(parts, done=0, num_steps=num_steps))
    seconds = asyncio.get_running_loop().time()
    open_groups = [
        int(group.group_id.removeprefix("g"))
        for group in buffer.state.wait_report().in_flight
    ] + [int(group.id.removeprefix("g")) for group in buffer.state.takeable()]
    first_unleased = buffer.state.snapshot(rollouts.version).groups_leased
    num_settled = min(open_groups, default=first_unleased)
    await dispatcher.stop()
    asked = [
        length for number in range(num_settled) for length in workload.lengths_G(number)
    ]
    trained_of_asked = [
        length
        for place, length in trained.items()
        if int(place.group_id.removeprefix("g")) < num_settled
    ]
    return VirtualResult(
        seconds=seconds,
        trained_tokens=sum(trained.values()),
        trained_lengths=list(trained.values()),
        asked_lengths=asked,
        trained_of_asked=trained_of_asked,
        ages=ages,
    )
