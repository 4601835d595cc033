"""The buffer's process: a Ray async actor around the state machine of
`group_buffer.py`.

`BufferActor` is a plain class: tests use it without Ray, and `host/ray/actor.py` runs
it as a Ray actor. It answers calls and polls the run store's outbox, through which
finished sessions arrive. Recording an outcome is idempotent, so an outcome may also be
pushed through `record`. The poller also reads what running rollouts have sampled from
the store, so that a group with tokens that are too old is dropped before its first
member ends.

The ledger is written by every poll, and before `trained` and `snapshot` answer. A write
that has begun always ends, even if its caller is cancelled or the actor closes
meanwhile, and the next write begins after it. While the disk is full, polling waits for
space, and a call that writes raises DiskFullError: its entries are kept, and
`write_ledger` writes them later. If polling fails otherwise, every call that waits for
work or for a batch raises that failure.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import FailureReport
from invrl.buffer.groups.event_counts import BufferCounts
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import configured_group_filter
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.groups.wait_report import WaitReport
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.ledger_store import LedgerStore
from invrl.errors import (
    DeadlineError,
    DiskFullError,
    FilteredOutError,
    RunStoreError,
)
from invrl.host.files.disk import full_disk, is_full
from invrl.host.output.log_lines import LogSettings
from invrl.host.processes.awake_time import AwakeClock
from invrl.host.processes.environment_keys import forget_keys
from invrl.host.ray.actor_heartbeat import Pulse, pulse
from invrl.host.ray.actor_output import begin_output
from invrl.rollout.config import RolloutConfig
from invrl.store.run_store import ExternalWaits, RunStore
from invrl.types.batches import TakenBatch
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease
from invrl.types.metrics import Metric
from invrl.types.rollouts import Outcome
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

_log = logging.getLogger(__name__)
_UNWANTED_WAIT_S = 20.0
"""Maximum wait of `unwanted` for a group: less than the deadline of a call."""
_SUSPECTS_EVERY_S = 1.0
"""Pause between two queries of what the suspects of staleness have sampled."""
_LOOK_INTERVAL_S = 5.0
"""Pause between two checks of the length of a wait."""
_SPACE_POLL_S = 1.0
"""Pause between two attempts to write on a full disk."""


class BufferActor:
    """Process of the buffer. The arguments are sent to it, so `tasks_factory` is called
    there."""

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
        log: LogSettings | None = None,
    ) -> None:
        """`trains_all_roots` is False if only a session's main conversation is trained.
        `heartbeat_timeout_s` limits how long the ledger waits for other writers. `log`
        is for a process with its own log."""
        forget_keys()  # the task source and the group filter are user code
        self._buffer = GroupBuffer(
            config,
            rollout,
            tasks=tasks_factory(),
            group_filter=configured_group_filter(config),
            emit=lambda entry: self._entries.append(entry),
        )
        self._log_settings = log
        self._failure_limits = config.failures.limits()
        self._entries: list[LedgerEntry] = []
        self._writing = asyncio.Lock()
        self._incarnation = 0
        self._seen = 0
        """Number of the last recorded outbox row."""
        self._store_path = run_store_path
        self._external = rollout.external_environments
        self._outbox = RunStore(run_store_path)
        self._tokens = RunStore(run_store_path)
        """Second connection: the poller uses the first one in its thread."""
        self._checked: set[str] = set()
        """Ids of groups whose tokens were looked up in the store."""
        self._ledger = LedgerStore(
            run_store_path, heartbeat_timeout_s=heartbeat_timeout_s
        )
        self._poll_interval_s = poll_interval_s
        self._trains_all_roots = trains_all_roots
        self._leased_at: dict[str, float] = {}
        """Time of the last lease of each group in flight, on the monotonic clock."""
        self._next_suspects_check = 0.0
        """Time of the next check for suspects of staleness, on the monotonic clock."""
        self._poller: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._closed = False
        self._is_disk_full = False
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    async def start(self, snapshot: bytes | None = None) -> None:
        """Begin an incarnation of the run, from a checkpoint's snapshot or from the
        start, and begin to poll the outbox. A second call does nothing. Outbox rows of
        earlier incarnations count as described in `GroupBuffer.restore`."""
        if self._poller is not None:
            return
        if self._log_settings is not None:
            begin_output("buffer", self._log_settings)
        self._seen = self._ledger.last_outbox_row()
        if snapshot:
            self._restore(msgspec.json.decode(snapshot, type=BufferSnapshot))
        else:
            self._incarnation = self._ledger.begin(parent=0, step=0, sequence=0)
        self._poller = asyncio.create_task(self._poll())

    def _restore(self, snapshot: BufferSnapshot) -> None:
        self._incarnation = self._ledger.begin(
            parent=snapshot.incarnation,
            step=int(snapshot.trained),
            sequence=snapshot.sequence,
        )
        rows = self._outbox.outbox_after(
            snapshot.outbox_seq, self._seen - snapshot.outbox_seq
        )
        self._buffer.restore(snapshot, [outcome for _, outcome in rows])

    async def beat(self) -> Pulse:
        return pulse()

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """Return the buffer's state for a checkpoint. Everything it names (turns,
        outcomes, ledger entries) is on disk before this returns, so a power loss cannot
        take it after the checkpoint appears."""
        snapshot = self._buffer.snapshot(trained)
        snapshot = replace(
            snapshot, incarnation=self._incarnation, outbox_seq=self._seen
        )
        await self._write_ledger(to_disk=True)
        return msgspec.json.encode(snapshot)

    async def final_snapshot(self, trained: WeightVersion) -> bytes:
        """Return the snapshot for the checkpoint of a run that ends early, at any point
        of its loop."""
        self._buffer.settle(trained)
        return await self.snapshot(trained)

    async def lease(self) -> GroupLease | None:
        self._check_poller()
        lease = self._buffer.lease()
        if lease is not None:
            self._leased_at[lease.group_id] = time.monotonic()
        elif not self._buffer.can_fill:
            await self._notify()
        return lease

    async def record(self, outcome: Outcome) -> None:
        self._buffer.record(outcome)
        await self._notify()

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        """Return groups that were dropped while members of them were in flight, each
        once. Waits for the first one. Empty if there is none for `_UNWANTED_WAIT_S`, or
        if the buffer closes."""
        deadline = time.monotonic() + _UNWANTED_WAIT_S
        async with self._changed:
            while True:
                self._check_poller()
                groups = self._buffer.unwanted()
                remaining_s = deadline - time.monotonic()
                if groups or remaining_s <= 0 or self._closing.is_set():
                    return groups
                await self._wait_for_change(remaining_s)

    async def take(self, timeout_s: float) -> TakenBatch:
        """Wait for a batch.

        Raises IdenticalFailuresError once every rollout so far has failed for the same
        reason or too many in a row have failed in the same way; FilteredOutError once
        the group filter has dropped as many groups in a row as it may; DeadlineError,
        naming what is missing, after `timeout_s` or as soon as the task source cannot
        fill a batch.
        """
        awake_time = AwakeClock()
        start = awake_time.now()
        async with self._changed:
            while True:
                self._check_poller()
                self._check_failures()
                await self._drop_groups_without_tokens()
                batch = self._buffer.take()
                if batch is not None:
                    return batch
                filtered_out = self._buffer.filtered_out
                if filtered_out:
                    raise FilteredOutError(filtered_out)
                waited_s = awake_time.now() - start
                if waited_s >= timeout_s or not self._buffer.can_fill:
                    raise DeadlineError(f"a batch of {self._buffer}", waited_s)
                await self._wait_for_change(min(timeout_s - waited_s, _LOOK_INTERVAL_S))

    async def _wait_for_change(self, timeout_s: float) -> None:
        """Wait until the buffer has changed, for at most `timeout_s`. The caller holds
        `_changed`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _drop_groups_without_tokens(self) -> None:
        """Look up each group that may be taken in the store, once. Groups that the
        store has lost (a power loss, a damaged file) are dropped and the run
        continues."""
        while unchecked := [
            group for group in self._buffer.takeable() if group.id not in self._checked
        ]:
            summaries = [rollout for group in unchecked for rollout in group.rollouts_G]
            lost = await asyncio.to_thread(self._tokens.without_tokens, summaries)
            for group in unchecked:
                self._checked.add(group.id)
                faults = [
                    lost[rollout.session_id]
                    for rollout in group.rollouts_G
                    if rollout.session_id in lost
                ]
                if not faults:
                    continue
                _log.warning(
                    "group %s is dropped: in the run's store %s",
                    group.id,
                    "; ".join(faults),
                )
                self._buffer.drop_lost(group.id)

    async def trained(self, batch_id: int) -> None:
        self._buffer.trained(batch_id)
        await self._write_ledger()

    async def write_ledger(self) -> None:
        """Write the entries that a call left because the disk was full."""
        await self._write_ledger()

    async def advance(self, version: WeightVersion) -> None:
        self._buffer.advance(version)
        self._next_suspects_check = 0.0
        await self._notify()

    async def counts(self) -> BufferCounts:
        return self._buffer.counts()

    async def metrics(self) -> Mapping[str, Metric]:
        return self._buffer.metrics()

    async def close(self) -> None:
        """End the run: drop everything untrained, write the rest of the ledger, close
        the store. A second call does nothing, unless the first one found the disk full.
        The poller is not cancelled, because it may be in the middle of a write."""
        if self._closed:
            return
        if not self._closing.is_set():
            self._closing.set()
            await self._notify()
            if self._poller is not None:
                await self._poller
            self._buffer.close()
        await self._write_ledger()
        self._closed = True
        self._outbox.close()
        self._tokens.close()
        self._ledger.close()

    async def _poll(self) -> None:
        """Poll until `close`. The outbox is read in a thread: a slow disk must not
        delay leases."""
        try:
            while not self._closing.is_set():
                pause_s = self._poll_interval_s
                try:
                    if await self._poll_once():
                        continue
                except (DiskFullError, sqlite3.OperationalError) as error:
                    if not is_full(error, self._store_path.parent):
                        raise
                    pause_s = _SPACE_POLL_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._closing.wait()
        except Exception as error:
            self._failure = error
            await self._notify()

    async def _poll_once(self) -> bool:
        """Poll once and return whether there was an outcome."""
        rows = await asyncio.to_thread(self._outbox.outbox_after, self._seen)
        for number, outcome in rows:
            self._buffer.record(outcome)
            self._seen = number
        if rows:
            await self._notify()
        await self._drop_stale_in_flight()
        await self._write_ledger()
        return bool(rows)

    async def _drop_stale_in_flight(self) -> None:
        """Drop groups in which a running rollout has sampled tokens that are now too
        old. If only main conversations are trained, it is unknown until a rollout ends
        which of its tokens count, so none is dropped."""
        if not self._trains_all_roots:
            return
        if time.monotonic() < self._next_suspects_check:
            return
        suspects = self._buffer.suspects()
        if not suspects:
            return
        self._next_suspects_check = time.monotonic() + _SUSPECTS_EVERY_S
        sampled = await asyncio.to_thread(self._outbox.sampled_so_far, suspects)
        self._buffer.note_sampled(sampled)
        await self._notify()

    async def _write_ledger(self, *, to_disk: bool = False) -> None:
        """Write the new entries. If the caller is cancelled meanwhile, the write still
        completes."""
        await asyncio.shield(asyncio.ensure_future(self._write_entries(to_disk)))

    async def _write_entries(self, to_disk: bool) -> None:
        """Write the entries. They stay in the list until they are written, so a failed
        write loses none. Raises DiskFullError."""
        async with self._writing:
            entries = list(self._entries)
            if not entries and not to_disk:
                return
            try:
                await asyncio.to_thread(self._ledger.write, entries, to_disk=to_disk)
            except sqlite3.Error as error:
                disk_full = self._disk_full(error)
                if disk_full is None:
                    raise
                raise disk_full from error
            self._is_disk_full = False
            del self._entries[: len(entries)]

    def _disk_full(self, error: sqlite3.Error) -> DiskFullError | None:
        """Return the error for a full disk, which is logged once; None for another
        error."""
        folder = self._store_path.parent
        if not is_full(error, folder):
            return None
        reason = full_disk(folder) or f"the disk of {folder} is full"
        if not self._is_disk_full:
            _log.error("%s; the ledger waits for space", reason)
        self._is_disk_full = True
        return DiskFullError(reason)

    async def failures(self) -> FailureReport:
        """Report which rollouts have failed so far, and how many of the last failures
        were identical."""
        return self._buffer.failure_report()

    async def waiting(self) -> WaitReport:
        """Report what the next batch waits for, and since when; the group that was
        leased earliest comes first."""
        report = self._buffer.wait_report()
        now = time.monotonic()
        leased_at: dict[str, float] = {}
        in_flight = []
        for group in report.in_flight:
            since = self._leased_at.get(group.group_id, now)
            leased_at[group.group_id] = since
            in_flight.append(replace(group, since_s=now - since))
        self._leased_at = leased_at  # groups that are no longer in flight are forgotten
        in_flight.sort(key=lambda group: -group.since_s)
        outside = None
        if self._external and in_flight:
            outside = await asyncio.to_thread(
                self._external_waits, in_flight[0].group_id
            )
        return replace(report, in_flight=tuple(in_flight), outside=outside)

    def _external_waits(self, group_id: str) -> ExternalWaits:
        """Read the waits from another connection: the others are in use in their
        threads."""
        with contextlib.closing(RunStore(self._store_path)) as store:
            return store.external_waits(group_id, time.time())

    def _check_failures(self) -> None:
        self._failure_limits.check(self._buffer.failure_report())

    def _check_poller(self) -> None:
        if self._failure is not None:
            raise RunStoreError(
                f"reading or writing the run store failed: {self._failure!r}"
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
