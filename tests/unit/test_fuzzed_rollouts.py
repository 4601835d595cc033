"""Ten thousand rollouts whose user code does anything: through the real runner, the
gateway's own summary, the real buffer and the real batch. Nothing raises, every place
ends once, only finite numbers are trained."""

from __future__ import annotations

import asyncio
import fractions
import itertools
import logging
import math
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from slow_cases import first_quick

from invrl.algorithms.advantages.advantages import ADVANTAGES
from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import group_filter_function
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.open_group import RolloutState
from invrl.buffer.samples.training_samples import build_batch
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.rollout_summary import failed, summarise
from invrl.host.processes.awake_time import awake_wait
from invrl.interfaces import RolloutResult
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers import held_time
from invrl.rollout.workers.runner import Failure, Runner
from invrl.types.extra_columns import ExtraColumn
from invrl.types.leases import Place
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Rollout, RolloutSummary
from invrl.types.sessions import MAX_REWARD, Sampling, Session
from invrl.types.tasks import Task
from invrl.types.turns import Trajectory, Turn, VersionSpan
from invrl.types.weights import WeightVersion

ROLLOUTS = 10_000
GROUP = 2
BATCH = 3
AT_ONCE = 256
TIMEOUT_S = 3600.0
KEY = "sk-secret-of-session-"
SCORE = ExtraColumn(name="score", level="rollout")


class Hostile(Exception):
    """Whatever is asked of it raises."""

    def __str__(self) -> str:
        raise ValueError("no text")

    @property
    def request(self) -> object:
        raise LookupError("no request")

    @property
    def response(self) -> object:
        raise LookupError("no response")


class BadFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("no float")


class BadMapping(dict):
    def items(self):
        raise KeyError("no items")


class Own(BaseException):
    pass


class Address:
    model = "m"

    def __init__(self, session: Session) -> None:
        self.api_key = session.key
        self.base_url = session.base_url

    def openai(self):
        raise AssertionError("the fuzz makes its turns itself")


def circular() -> Exception:
    first = ValueError("a")
    second = ValueError("b")
    first.__cause__ = second
    second.__cause__ = first
    return first


def status_error(url: str) -> openai.APIStatusError:
    response = httpx.Response(503, request=httpx.Request("POST", url))
    return openai.APIStatusError(f"503 from {url}", response=response, body=None)


REWARDS: list[Callable[[random.Random], object]] = [
    lambda r: r.random(),
    lambda r: r.choice([0, 1, True, False, -3]),
    lambda r: np.float32(r.random()),
    lambda r: r.choice([np.float64(0.25), np.int64(2), np.bool_(True), np.float16(1)]),
    lambda r: fractions.Fraction(1, 3),
    lambda r: r.choice([MAX_REWARD, -MAX_REWARD, 5e-324, 1e-30, 1e8]),
    lambda r: r.choice(
        [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("-inf")]
    ),
    lambda r: r.choice([1e300, -1e300, 3.5e38, 10**400, 1e10]),
    lambda r: r.choice(["1.0", "", b"1", "\ud800"]),
    lambda r: None,
    lambda r: r.choice(
        [1j, Decimal("1"), object(), [1.0], (1.0,), {"reward": 1.0}, {1.0}, type, print]
    ),
    lambda r: r.choice(
        [np.array(1.0), np.array([1.0, 2.0]), np.array([]), np.array("x")]
    ),
    lambda r: BadFloat(1.0),
]


def returned(r: random.Random) -> object:
    """What user code returns: a reward, or a result around one, or around another."""
    value = r.choice(REWARDS if r.random() < 0.5 else REWARDS[:6])(r)
    if r.random() < 0.6:
        return value
    usual = [
        {},
        {"a": 1},
        {"a": r.choice(REWARDS)(r)},
        {3: 0.5},
        {"\ud800": 1.0},
    ]
    parts = r.choice([*usual, [1.0], None, BadMapping(a=1), {"x" * 5000: "no"}])
    value = RolloutResult(reward=value) if r.random() < 0.1 else value  # type: ignore[arg-type]
    return RolloutResult(
        reward=value,  # type: ignore[arg-type]
        components=parts,  # type: ignore[arg-type]
        output="x" * r.randrange(99),
        numbers=mostly(
            {},
            {"score": 1.0},
            {"score": r.choice(REWARDS)(r)},
            {3: 1},
            None,
            BadMapping(a=1),
        )(r),
        turn_numbers=mostly(
            {}, {}, {"t": {"w": r.choice(REWARDS)(r)}}, {"t": 1.0}, [1.0]
        )(r),
        token_numbers=mostly(
            {}, {}, {"t": {"p": [r.choice(REWARDS)(r)]}}, {"t": {"p": "12"}}, "x"
        )(r),
    )


def mostly(*values: Any) -> Callable[[random.Random], Any]:
    """One of the first two in nine of ten calls."""
    return lambda r: r.choice(values[:2] if r.random() < 0.9 else values)


def raised(r: random.Random, address: Address) -> BaseException:
    url = f"{address.base_url}/chat/completions"
    return r.choice(
        [
            lambda: ValueError(f"the key is {address.api_key}"),
            lambda: KeyError("\ud800 \x00"),
            lambda: RuntimeError("x" * 100_000),
            Hostile,
            circular,
            lambda: SyntaxError("s", ("f", "line", None, object())),  # type: ignore[arg-type]
            lambda: ExceptionGroup("g", [ValueError(), status_error(url)]),
            lambda: BaseExceptionGroup("g", [KeyboardInterrupt(), SystemExit(2)]),
            lambda: status_error(url),
            lambda: httpx.ReadTimeout(url, request=httpx.Request("POST", url)),
            lambda: httpx.ConnectError(url),
            lambda: StopIteration(3),
            StopAsyncIteration,
            RecursionError,
            MemoryError,
            AssertionError,
            lambda: SystemExit(0),
            lambda: SystemExit("text"),
            KeyboardInterrupt,
            GeneratorExit,
            asyncio.CancelledError,
            asyncio.InvalidStateError,
            Own,
        ]
    )()


class Deadline:
    """Of all rollouts that run together. It comes when each of them has ended or hangs,
    and sooner for none: by the clock, a slow machine would fail those that end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._come = asyncio.Event()
        self._left = 0

    def start(self, rollouts: int) -> None:
        self._come = asyncio.Event()
        self._left = rollouts

    def one_less(self) -> None:
        """A rollout has ended or, from any thread, will not."""
        self._loop.call_soon_threadsafe(self._count)

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._come.set()

    async def wait(
        self,
        tasks: set[asyncio.Task],
        timeout_s: float,
        *,
        return_when: str = asyncio.ALL_COMPLETED,
    ) -> tuple[set, set]:
        """In the place of `awake_wait`. A rollout's own wait, which is known by its
        timeout, ends with the first of its tasks."""
        if timeout_s != TIMEOUT_S:
            return await awake_wait(tasks, timeout_s, return_when=return_when)
        come = asyncio.create_task(self._come.wait())
        done, left = await asyncio.wait(
            {*tasks, come}, return_when=asyncio.FIRST_COMPLETED
        )
        if not come.cancel():
            return done - {come}, left
        self.one_less()
        return done, left - {come}


class Fuzz:
    """One rollout function, async or not, whose behaviour follows from the task's and
    the endpoint's name."""

    def __init__(
        self, seed: int, *, release: threading.Event, deadline: Deadline
    ) -> None:
        self._seed = seed
        self._release = release
        self._deadline = deadline

    def source(self, address: Address) -> random.Random:
        return random.Random(f"{self._seed}/{address.base_url}")

    async def async_form(self, task: Task, address: Address) -> object:
        r = self.source(address)
        print(f"my key is {address.api_key}")
        if r.random() < 0.3:
            await asyncio.sleep(0)
        kind = r.random()
        if kind < 0.75:
            return returned(r)
        if kind < 0.90:
            raise raised(r, address)
        if kind < 0.93 or 0.95 <= kind < 0.96:
            self._deadline.one_less()
        if kind < 0.93:
            await asyncio.Event().wait()  # never ends
        if kind < 0.95:
            task_of_ours = asyncio.current_task()
            assert task_of_ours is not None
            task_of_ours.cancel()
        if kind < 0.96:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ValueError("instead of a cancellation") from None
        if kind < 0.97:
            return self.async_form  # forgot to call it
        if kind < 0.98:
            return asyncio.sleep(0)  # forgot to await it
        return await asyncio.gather(asyncio.sleep(0, 1.0), asyncio.sleep(0, 2.0))

    def sync_form(self, task: Task, address: Address) -> object:
        r = self.source(address)
        if r.random() < 0.02:
            self._deadline.one_less()
            self._release.wait(20)  # blocks for longer than the deadline
        if r.random() < 0.3:
            raise raised(r, address)
        if r.random() < 0.05:
            sys.exit(3)
        return returned(r)


def turns_of(session: Session, r: random.Random, version: int) -> list[Turn]:
    """What the gateway recorded: none (the prompt was over the context), empty, aborted
    or lost ones too."""
    turns: list[Turn] = []
    for n in range(r.choice([0, 1, 1, 1, 1, 2, 2, 3])):
        sampled = r.choice([0, 1, 4, 9, 9])
        turns.append(
            Turn(
                id=f"{session.id}/{n}",
                session_id=session.id,
                parent_id=turns[-1].id if turns and r.random() < 0.7 else None,
                context_ids_T=np.arange(r.randrange(0, 6), dtype=np.int32),
                sampled_ids_T=np.arange(sampled, dtype=np.int32),
                logprobs_T=-np.ones(sampled, np.float32) * r.choice([0.0, 0.5, 30.0]),
                spans=(
                    VersionSpan(version=WeightVersion(version), start=0, end=sampled),
                )
                if sampled
                else (),
                finish_reason=r.choice(["stop", "stop", "length", "abort"]),
                request_digest="",
                delivered=r.random() < 0.9,
                temperature=1.0,
                prompt_tokens=5,
                cached_tokens=0,
                fork_reason="",
                started_at=0.0,
                finished_at=1.0,
            )
        )
    return turns


def trajectories(turns: list[Turn]) -> tuple[Trajectory, ...]:
    by_id = {turn.id: turn for turn in turns}
    parents = {turn.parent_id for turn in turns}
    paths: list[Trajectory] = []
    for leaf in turns:
        if leaf.id in parents:
            continue
        path = [leaf]
        while path[0].parent_id is not None:
            path.insert(0, by_id[path[0].parent_id])
        paths.append(Trajectory(turns=tuple(path)))
    return tuple(paths)


class Loop:
    """The life of rollouts from the lease to the batch, everything real but the
    processes between."""

    def __init__(self, seed: int, form: str, reward_form: bool) -> None:
        self.random = random.Random(seed)
        self.entries: list[LedgerEntry] = []
        self.rollouts: dict[str, Rollout] = {}
        self.reasons: Counter[str] = Counter()
        self.details: list[str] = []
        self.release = threading.Event()
        self.version = 0
        self.count = self.batches = self.rows = 0
        tasks = (Task(id=f"t{n}", payload={}) for n in itertools.count())
        self.buffer = GroupBuffer(
            BufferConfig(max_staleness=8, over_sampling_groups=AT_ONCE),
            RolloutConfig(
                rollout_batch_size=BATCH,
                n_samples_per_prompt=GROUP,
                rollout_max_attempts=3,
            ),
            tasks=tasks,
            group_filter=group_filter_function(
                self.random.choice(["nonzero_variance", "none"])
            ),
            emit=self.entries.append,
        )
        self.deadline = Deadline()
        fuzz = Fuzz(seed, release=self.release, deadline=self.deadline)

        def judge(task: Task, result: RolloutResult) -> object:
            return result.reward if result.reward is not None else 0.5

        self.runner = Runner(
            getattr(fuzz, form),
            judge if reward_form else None,  # type: ignore[arg-type]
            timeout_s=TIMEOUT_S,
        )

    async def run(self, wanted: int) -> None:
        """Leases and runs until so many have ended."""
        while self.count < wanted:
            leases = []
            while (
                len(leases) < AT_ONCE // GROUP
                and (lease := self.buffer.lease()) is not None
            ):
                leases.append(lease)
            self.deadline.start(sum(len(lease.members) for lease in leases))
            await asyncio.gather(
                *(
                    self.one(lease, member)
                    for lease in leases
                    for member in lease.members
                )
            )
            stepped = self.step()
            assert leases or stepped, f"neither work nor a batch: {self.buffer}"
            while stepped and self.random.random() < 0.7:
                stepped = self.step()
        self.buffer.close()

    async def one(self, lease, member) -> None:
        self.count += 1
        name = f"{lease.group_id}.{member.index}.{member.attempt}"
        session = Session(
            id=name,
            key=KEY + name,
            base_url=f"http://127.0.0.1:1/s/{KEY}{name}/v1",
            task_id=lease.task.id,
            group_id=lease.group_id,
            index=member.index,
            attempt=member.attempt,
            purpose="train",
            sampling=Sampling(),
        )
        started = self.version
        (outcome,) = await self.runner.run(lease.task, [Address(session)])  # type: ignore[list-item]
        record = SessionRecord(session=session, key_hash=b"", opened_at=0.0)
        ended: RolloutSummary | FailedRollout
        if isinstance(outcome, Failure):
            self.details.append(outcome.detail)
            ended = failed(record, outcome.reason, outcome.detail)
        else:
            record.reward = outcome.reward
            record.components = dict(outcome.components)
            record.numbers = dict(outcome.extra.numbers)
            turns = turns_of(session, random.Random(f"turns/{name}"), started)
            ended = summarise(
                record, turns, {turn.id for turn in turns if turn.delivered}, 1.0
            )
            if isinstance(ended, RolloutSummary):
                self.rollouts[session.id] = Rollout(
                    summary=ended, trajectories=trajectories(turns)
                )
        self.reasons[
            ended.reason if isinstance(ended, FailedRollout) else "scored"
        ] += 1
        self.buffer.record(ended)
        if self.random.random() < 0.1:
            self.buffer.record(ended)  # the outbox may hand over twice

    def step(self) -> bool:
        """Takes and checks a batch, if there is one."""
        taken = self.buffer.take()
        if taken is None:
            return False
        ids = [
            rollout.session_id for group in taken.groups for rollout in group.rollouts_G
        ]
        advantage = ADVANTAGES[self.random.choice(sorted(ADVANTAGES))]
        rollouts = [self.rollouts[id] for id in ids]
        batch = build_batch(taken, rollouts, advantage, 1e-4, extra_columns=[SCORE])
        for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True):
            assert math.isfinite(sample.reward)
            assert np.isfinite(np.float32(sample.numbers["score"]))
            assert np.isfinite(advantages_T).all()
            assert np.isfinite(sample.rollout_logprobs_T).all()
            assert sample.loss_mask_T.any()
            # What losses compute with: float32 squares of advantages stay finite.
            assert np.isfinite(np.square(advantages_T)).all()
        self.rows += len(batch.samples)
        self.batches += 1
        self.version += 1
        self.buffer.trained(taken.batch_id)
        self.buffer.advance(WeightVersion(self.version))
        return True


@pytest.mark.parametrize(
    ("form", "reward_form", "share"),
    first_quick(
        [
            ("async_form", True, 0.2),
            ("async_form", False, 0.6),
            ("sync_form", False, 0.2),
        ]
    ),
)
async def test_random_rollout_results_neither_crash_the_run_nor_reach_the_optimizer_with_bad_numbers(
    form: str,
    reward_form: bool,
    share: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = int(ROLLOUTS * share)
    loop = Loop(2026, form, reward_form)
    monkeypatch.setattr(held_time, "awake_wait", loop.deadline.wait)
    with caplog.at_level(logging.DEBUG):
        try:
            await asyncio.wait_for(loop.run(wanted), 540)
        finally:
            loop.release.set()
    assert loop.count >= wanted
    last: dict[Place, RolloutState] = {}
    ends: Counter[Place] = Counter()
    for entry in loop.entries:
        last[entry.place] = entry.state
        ends[entry.place] += entry.state in (RolloutState.TRAINED, RolloutState.DROPPED)
    assert len(last) == loop.count, "every place that was leased is in the ledger"
    assert set(ends.values()) == {1}, "and ended exactly once"
    assert loop.batches > wanted // 200
    assert loop.rows > loop.batches
    seen = {
        FailureReason.EXCEPTION,
        FailureReason.TIMEOUT,
        FailureReason.BAD_RETURN,
        FailureReason.EMPTY,
    }
    assert seen | {FailureReason.BAD_REWARD, FailureReason.ENGINE, "scored"} <= set(
        loop.reasons
    )
    for detail in loop.details:
        assert KEY not in detail
        assert len(detail) <= 2000
    assert KEY not in caplog.text
    print(
        f"{loop.count} rollouts, {loop.batches} batches, {loop.rows} rows: {dict(loop.reasons)}"
    )
