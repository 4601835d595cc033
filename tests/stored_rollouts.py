"""Finished rollouts in a run's store, as the gateway leaves them: session, turns,
outcome, outbox row."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from invrl.store.rows import StoredSession
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types import (
    GroupLease,
    RolloutSummary,
    Sampling,
    Session,
    Turn,
    VersionSpan,
    WeightVersion,
)


def finish_lease(
    store: RunStoreWriter, lease: GroupLease, *, version: int = 0, turns: int = 1
) -> list[RolloutSummary]:
    """Every member of the lease finishes under this version, with its index as the
    reward."""
    summaries = [
        summary_of(lease, index=m.index, attempt=m.attempt, version=version)
        for m in lease.members
    ]
    for summary in summaries:
        finish(store, replace(summary, num_turns=turns))
    return [replace(summary, num_turns=turns) for summary in summaries]


def summary_of(
    lease: GroupLease, *, index: int, attempt: int, version: int
) -> RolloutSummary:
    return RolloutSummary(
        session_id=f"{lease.group_id}.{index}.{attempt}",
        task_id=lease.task.id,
        group_id=lease.group_id,
        index=index,
        attempt=attempt,
        reward=float(index),
        num_turns=1,
        prompt_tokens=1,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=1,
        trained_tokens=1,
        truncated=False,
        oldest_version=WeightVersion(version),
        newest_version=WeightVersion(version),
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


def finish(store: RunStoreWriter, summary: RolloutSummary) -> None:
    """What the gateway writes from the opening of a session to its end."""
    name = summary.session_id
    session = Session(
        id=name,
        key=name,
        base_url="",
        task_id=summary.task_id,
        group_id=summary.group_id,
        index=summary.index,
        attempt=summary.attempt,
        purpose="train",
        sampling=Sampling(),
    )
    key_hash = hashlib.sha256(name.encode()).digest()
    store.open_sessions(
        [StoredSession(session=session, key_hash=key_hash, opened_at=0.0)]
    ).result(60)
    parent: str | None = None
    for number in range(summary.num_turns):
        turn = _turn(f"{name}/{number}", name, parent, summary.oldest_version)
        store.add_turn(turn, b"[]").result(60)
        store.mark_delivered(turn.id).result(60)
        parent = turn.id
    store.close_session(name, "finished", summary, hand_over=True).result(60)


def _turn(
    name: str, session_id: str, parent: str | None, version: WeightVersion
) -> Turn:
    return Turn(
        id=name,
        session_id=session_id,
        parent_id=parent,
        context_ids_T=np.array([1, 2], np.int32),
        sampled_ids_T=np.array([3], np.int32),
        logprobs_T=np.array([-0.5], np.float32),
        spans=(VersionSpan(version=version, start=0, end=1),),
        finish_reason="stop",
        request_digest="",
        delivered=False,
        temperature=1.0,
        prompt_tokens=2,
        cached_tokens=0,
        fork_reason="",
        started_at=0.0,
        finished_at=1.0,
    )
