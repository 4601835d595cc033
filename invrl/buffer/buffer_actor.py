"""The buffer's process: a Ray async actor around the state machine of `buffer.py`.

A plain class: tests make one without Ray, `run/cluster.py` wraps it with `ray.remote`. It receives, calls,
replies, and polls the run store's outbox, through which finished sessions arrive; recording is idempotent, so
an outcome may also be pushed through `record`. The poller also asks the store what running rollouts have
sampled, so that a group with tokens that are too old is dropped before one of its members ends. The ledger is
written behind, with every poll, and before `trained` and `snapshot` answer; a write that has begun ends,
whoever is cancelled or closes meanwhile, and the next begins after it. Whoever waits for work or a batch gets
a failure of the polling."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from invrl.buffer.buffer import Buffer
from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import FailureReport
from invrl.buffer.group_filters import group_filter_function
from invrl.buffer.ledger import LedgerEntry
from invrl.buffer.ledger_store import LedgerStore
from invrl.buffer.snapshot import BufferSnapshot
from invrl.buffer.wait_report import WaitReport
from invrl.errors import BufferStateError, DeadlineError, FilteredOutError
from invrl.host.actor_heartbeat import Pulse, pulse
from invrl.host.environment_keys import forget_keys
from invrl.metrics import Metric
from invrl.rollout.config import RolloutConfig
from invrl.store.run_store import RunStore, WaitsOutside
from invrl.types import DroppedGroup, GroupLease, Outcome, TakenBatch, Task, WeightVersion

_log = logging.getLogger(__name__)
_UNWANTED_WAIT_S = 20.0
"""How long `unwanted` waits for a group: less than the deadline of a call."""
_SUSPECTS_EVERY_S = 1.0
"""Between two looks at what the suspects of staleness have sampled."""


class BufferActor:
    """Arguments travel to the actor's process, so `tasks_factory` is called there."""

    def __init__(
        self,
        config: BufferConfig,
        rollout: RolloutConfig,
        *,
        tasks_factory: Callable[[], Iterator[Task]],
        run_store_path: Path,
        trains_all_roots: bool = True,
        poll_interval_s: float = 0.02,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """`trains_all_roots`: False where only a session's main conversation is trained.
        `heartbeat_timeout_s`: of the run, which the ledger's waits for other processes follow."""
        forget_keys()  # the task source and the group filter are user code
        self._buffer = Buffer(
            config,
            rollout,
            tasks=tasks_factory(),
            group_filter=group_filter_function(config.group_filter, config.turn_reward_baseline),
            emit=lambda entry: self._entries.append(entry),
        )
        self._failure_limits = config.failure_limits()
        self._entries: list[LedgerEntry] = []
        self._writing = asyncio.Lock()
        self._incarnation = self._seen = 0
        self._store_path = run_store_path
        self._external = rollout.external_environments
        self._outbox = RunStore(run_store_path)
        self._tokens = RunStore(run_store_path)
        """A connection of its own: the poller's is in use in its thread."""
        self._checked: set[str] = set()
        """Groups whose tokens are in the store."""
        self._ledger = LedgerStore(run_store_path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._poll_interval_s = poll_interval_s
        self._trains_all_roots = trains_all_roots
        self._leased_at: dict[str, float] = {}
        """When rollouts of a group in flight were last leased, on the monotonic clock."""
        self._next_look = 0.0
        """At suspects of staleness: when it is due, on the monotonic clock."""
        self._poller: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    async def start(self, snapshot: bytes | None = None) -> None:
        """Begin an incarnation of the run, from a checkpoint's snapshot or anew, and poll the outbox. Once;
        answers when the actor is alive. Outbox rows of earlier incarnations count only as `Buffer.restore`
        says."""
        if self._poller is not None:
            return
        before = msgspec.json.decode(snapshot, type=BufferSnapshot) if snapshot else None
        parent, step, sequence = (
            (before.incarnation, int(before.trained), before.sequence) if before else (0, 0, 0)
        )
        self._incarnation = self._ledger.begin(parent=parent, step=step, sequence=sequence)
        newest = self._ledger.last_outbox_row()
        if before is not None:
            since = self._outbox.outbox_after(before.outbox_seq, newest - before.outbox_seq)
            self._buffer.restore(before, [outcome for _, outcome in since])
        self._seen = newest
        self._poller = asyncio.create_task(self._poll())

    async def beat(self) -> Pulse:
        return pulse()

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """The buffer as of now, for a checkpoint. What it names (turns, outcomes, its ledger entries) is on
        disk before this answers, so before the checkpoint appears: after a power loss it is there."""
        taken = replace(self._buffer.snapshot(trained), incarnation=self._incarnation, outbox_seq=self._seen)
        await self._keep(to_disk=True)
        return msgspec.json.encode(taken)

    async def lease(self) -> GroupLease | None:
        self._check_poller()
        lease = self._buffer.lease()
        if lease is not None:
            self._leased_at[lease.group_id] = time.monotonic()
        if lease is None and not self._buffer.can_fill:
            await self._notify()
        return lease

    async def record(self, outcome: Outcome) -> None:
        self._buffer.record(outcome)
        await self._notify()

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        """Groups that were dropped while members of theirs were in flight, each named once. Waits for the
        first one; empty if none comes for a while, or the buffer closes."""
        deadline = time.monotonic() + _UNWANTED_WAIT_S
        async with self._changed:
            while True:
                self._check_poller()
                groups = self._buffer.unwanted()
                left = deadline - time.monotonic()
                if groups or left <= 0 or self._closing.is_set():
                    return groups
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()

    async def take(self, timeout_s: float) -> TakenBatch:
        """Waits for a batch. Raises IdenticalFailuresError once every rollout so far has failed for the same
        reason, or too many in a row have failed alike; FilteredOutError once the group filter has dropped as
        many groups in a row as it may; DeadlineError, naming what is missing, after `timeout_s` or as soon
        as the task source cannot fill a batch any more."""
        start = time.monotonic()
        async with self._changed:
            while True:
                self._check_poller()
                self._check_failures()
                await self._drop_groups_without_tokens()
                if (batch := self._buffer.take()) is not None:
                    return batch
                if reason := self._buffer.filtered_out:
                    raise FilteredOutError(reason)
                waited = time.monotonic() - start
                if waited >= timeout_s or not self._buffer.can_fill:
                    raise DeadlineError(f"a batch of {self._buffer}", waited)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s - waited):
                        await self._changed.wait()

    async def _drop_groups_without_tokens(self) -> None:
        """Each group that may be taken is looked up in the store once. A store that has lost what a
        checkpoint names (a power loss, a damaged file) costs those groups, not the run."""
        while unchecked := [one for one in self._buffer.takeable() if one.id not in self._checked]:
            summaries = [rollout for group in unchecked for rollout in group.rollouts_G]
            lost = await asyncio.to_thread(self._tokens.without_tokens, summaries)
            for group in unchecked:
                self._checked.add(group.id)
                gone = sorted(lost & {rollout.session_id for rollout in group.rollouts_G})
                if gone:
                    _log.warning(
                        "group %s is dropped: the store has no turns of %s", group.id, ", ".join(gone)
                    )
                    self._buffer.drop_lost(group.id)

    async def trained(self, batch_id: int) -> None:
        self._buffer.trained(batch_id)
        await self._keep()

    async def advance(self, version: WeightVersion) -> None:
        self._buffer.advance(version)
        self._next_look = 0.0
        await self._notify()

    async def metrics(self) -> Mapping[str, Metric]:
        return self._buffer.metrics()

    async def close(self) -> None:
        """End the run: everything untrained is dropped, the ledger is whole, the store is closed. Again: no
        effect. The poller is not cancelled, because it may be in the middle of a write."""
        if self._closing.is_set():
            return
        self._closing.set()
        await self._notify()
        if self._poller is not None:
            await self._poller
        self._buffer.close()
        await self._keep()
        self._outbox.close()
        self._tokens.close()
        self._ledger.close()

    async def _poll(self) -> None:
        """Until `close`. The outbox is read in a thread: a slow disk must not hold up leases."""
        try:
            while not self._closing.is_set():
                rows = await asyncio.to_thread(self._outbox.outbox_after, self._seen)
                for number, outcome in rows:
                    self._buffer.record(outcome)
                    self._seen = number
                await self._look_at_suspects()
                await self._keep()
                if rows:
                    await self._notify()
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._poll_interval_s):
                            await self._closing.wait()
        except Exception as error:
            self._failure = error
            await self._notify()

    async def _look_at_suspects(self) -> None:
        """Drops groups in which a running rollout has sampled tokens that are too old by now. Where only main
        conversations are trained, it is not known before the end which tokens count: then none is dropped."""
        if not self._trains_all_roots or time.monotonic() < self._next_look:
            return
        suspects = self._buffer.suspects()
        if not suspects:
            return
        self._next_look = time.monotonic() + _SUSPECTS_EVERY_S
        sampled = await asyncio.to_thread(self._outbox.sampled_so_far, suspects)
        self._buffer.note_sampled(sampled)
        await self._notify()

    async def _keep(self, *, to_disk: bool = False) -> None:
        """Writes the ledger. If the caller is cancelled meanwhile, the write goes on and ends by itself."""
        await asyncio.shield(asyncio.ensure_future(self._write(to_disk)))

    async def _write(self, to_disk: bool) -> None:
        """Entries stay in the list until their write has succeeded."""
        async with self._writing:
            entries = list(self._entries)
            if entries or to_disk:
                await asyncio.to_thread(self._ledger.write, entries, to_disk=to_disk)
                del self._entries[: len(entries)]

    async def failures(self) -> FailureReport:
        """What has failed so far, and how many of the last failures were the same."""
        return self._buffer.failure_report()

    async def waiting(self) -> WaitReport:
        """What the next batch waits for, and since when; the group that was leased first comes first."""
        report = self._buffer.wait_report()
        now = time.monotonic()
        self._leased_at = {
            group.group_id: self._leased_at.get(group.group_id, now) for group in report.in_flight
        }
        timed = [replace(one, since_s=now - self._leased_at[one.group_id]) for one in report.in_flight]
        timed.sort(key=lambda group: -group.since_s)
        outside = None
        if self._external and timed:
            outside = await asyncio.to_thread(self._waits_outside, timed[0].group_id)
        return replace(report, in_flight=tuple(timed), outside=outside)

    def _waits_outside(self, group_id: str) -> WaitsOutside:
        """By a connection of its own: the others are in use in their threads."""
        with contextlib.closing(RunStore(self._store_path)) as store:
            return store.waits_outside(group_id, time.time())

    def _check_failures(self) -> None:
        self._failure_limits.check(self._buffer.failure_report())

    def _check_poller(self) -> None:
        if self._failure is not None:
            raise BufferStateError(f"reading or writing the run store failed: {self._failure!r}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
