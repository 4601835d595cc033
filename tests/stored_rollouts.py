"""Finished rollouts in a run's store, as the gateway leaves them: session, turns,
outcome, outbox row."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from invrl.store.rows import StoredSession
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task
from invrl.types.turns import Turn, VersionSpan
from invrl.types.weights import WeightVersion


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


def open_session(name: str, index: int = 0) -> Session:
    return Session(
        id=name,
        key="isk-secret-" + name,
        base_url="http://x",
        task_id="t",
        group_id="g",
        index=index,
        attempt=0,
        purpose="train",
        sampling=Sampling(),
    )


def stored_session(
    name: str, key_hash: bytes, opened_at: float, index: int = 0
) -> StoredSession:
    return StoredSession(
        session=open_session(name, index), key_hash=key_hash, opened_at=opened_at
    )


def turn(
    name: str, session_id: str = "a", parent: str | None = None, sampled: int = 3
) -> Turn:
    """A turn whose fields all differ from their defaults, sampled by two versions."""
    return Turn(
        id=name,
        session_id=session_id,
        parent_id=parent,
        context_ids_T=np.arange(5, dtype=np.int32),
        sampled_ids_T=np.arange(sampled, dtype=np.int32) + 100_000,
        logprobs_T=np.linspace(-3, -1e-7, sampled, dtype=np.float32),
        spans=(
            VersionSpan(version=WeightVersion(3), start=0, end=1),
            VersionSpan(version=WeightVersion(4), start=1, end=sampled),
        ),
        finish_reason="stop",
        request_digest="d",
        delivered=False,
        temperature=0.7,
        prompt_tokens=5,
        cached_tokens=2,
        fork_reason="",
        started_at=1.25,
        finished_at=2.5,
    )


def taken_batch(groups: int = 4, members: int = 8) -> TakenBatch:
    """A batch of groups in which each rollout's reward is its index."""
    taken_groups = []
    for number in range(groups):
        places = tuple(GroupMember(index=index, attempt=0) for index in range(members))
        lease = GroupLease(
            group_id=f"g{number}",
            task=Task(id=f"task-{number}", payload={}),
            members=places,
        )
        rollouts = tuple(
            summary_of(lease, index=index, attempt=0, version=0)
            for index in range(members)
        )
        group = Group(id=lease.group_id, task_id=lease.task.id, rollouts_G=rollouts)
        taken_groups.append(group)
    return TakenBatch(batch_id=0, version=WeightVersion(0), groups=tuple(taken_groups))
