"""A buffer of small groups, and the outcomes that tests record in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from invrl.buffer.config import BufferConfig
from invrl.buffer.group_buffer import GroupBuffer
from invrl.buffer.group_filters import GROUP_FILTERS
from invrl.buffer.ledger import LedgerEntry
from invrl.buffer.snapshot import BufferSnapshot
from invrl.interfaces import GroupFilter
from invrl.reasons import FailureReason
from invrl.rollout.config import RolloutConfig
from invrl.types import (
    FailedRollout,
    GroupLease,
    Place,
    RolloutSummary,
    Task,
    WeightVersion,
)


def summary(
    group_id: str,
    index: int,
    attempt: int = 0,
    *,
    reward: float = 1.0,
    oldest: int = 0,
    newest: int = 0,
    tokens: int = 5,
) -> RolloutSummary:
    return RolloutSummary(
        session_id=f"{group_id}.{index}.{attempt}",
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=attempt,
        reward=reward,
        num_turns=1,
        prompt_tokens=10,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=tokens,
        trained_tokens=tokens,
        truncated=False,
        oldest_version=WeightVersion(oldest),
        newest_version=WeightVersion(newest),
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


def failure(group_id: str, index: int, attempt: int = 0) -> FailedRollout:
    return FailedRollout(
        session_id=f"{group_id}.{index}.{attempt}",
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=attempt,
        reason=FailureReason.EXCEPTION,
        detail="boom",
    )


def finished(
    place: Place, *, reward: float, oldest: int, newest: int, tokens: int = 5
) -> RolloutSummary:
    return summary(
        place.group_id,
        place.index,
        place.attempt,
        reward=reward,
        oldest=oldest,
        newest=newest,
        tokens=tokens,
    )


def failed(
    place: Place, reason: FailureReason = FailureReason.TIMEOUT
) -> FailedRollout:
    return replace(
        failure(place.group_id, place.index, place.attempt), reason=reason, detail=""
    )


def tasks(count: int = 1000) -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in range(count))


def make(
    *,
    staleness: int = 0,
    over: int = 0,
    batch: int = 1,
    group: int = 2,
    attempts: int = 2,
    source: Iterator[Task] | None = None,
    group_filter: GroupFilter = GROUP_FILTERS["none"],
    entries: list[LedgerEntry] | None = None,
) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig(max_staleness=staleness, over_sampling_groups=over),
        RolloutConfig(
            rollout_batch_size=batch,
            n_samples_per_prompt=group,
            rollout_max_attempts=attempts,
        ),
        tasks=source if source is not None else tasks(),
        group_filter=group_filter,
        emit=[].append if entries is None else entries.append,
    )


def lease_all(buffer: GroupBuffer) -> list[GroupLease]:
    leases = []
    while (lease := buffer.lease()) is not None:
        leases.append(lease)
    return leases


def complete(
    buffer: GroupBuffer,
    group_id: str,
    *,
    oldest: int = 0,
    newest: int = 0,
    group: int = 2,
) -> None:
    for index in range(group):
        buffer.record(
            summary(group_id, index, reward=float(index), oldest=oldest, newest=newest)
        )


def through_bytes(buffer: GroupBuffer, trained: int) -> BufferSnapshot:
    """A snapshot of the buffer, as it comes back from its file."""
    snapshot = buffer.snapshot(WeightVersion(trained))
    return msgspec.json.decode(msgspec.json.encode(snapshot), type=BufferSnapshot)
