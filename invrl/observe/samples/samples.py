"""The rollouts of a run as samples for display: the fate of each, and the choice of
those to show. For live and ended runs; nothing is written.

The step of a training rollout is the one that trained it, along the surviving lineage
of the ledger. The step of a held-out rollout is the one that its evaluation came after
(0: before training). A dropped rollout has no step.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from invrl.buffer.config import FailureRule
from invrl.buffer.ledger.ledger_store import read_ledger
from invrl.store.rows import StoredSession
from invrl.store.run_store import RunStore
from invrl.types.leases import Place
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.sessions import Purpose, RolloutIdentity

if TYPE_CHECKING:
    from invrl.buffer.ledger.ledger import LedgerEntry
    from invrl.buffer.ledger.ledger_store import StoredEntry

_EVALUATION_PREFIX = "eval/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout that has ended."""

    identity: RolloutIdentity
    purpose: Purpose
    step: int | None
    """None if no step trained it, or if it belongs to `invrl serve`."""
    evaluation: str = ""
    """Evaluation of a held-out rollout: "<mode>", or "<set>/<mode>"."""
    state: str
    """Fate: trained, finished, grouped, taken, dropped (with the reason), failed, lost
    (a later incarnation of the run resumed from before it), evaluated, served."""
    reward: float | None
    """None if it failed and does not count."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: FailureReason | None = None
    detail: str = ""
    """Message of the failure."""
    num_turns: int = 0
    sampled_tokens: int = 0
    cut: bool = False
    """Whether one of its replies ran out of tokens."""
    oldest_version: int | None = None
    newest_version: int | None = None
    opened_at: float


def read_samples(
    path: Path, failure_rules: Mapping[FailureReason, FailureRule]
) -> list[Sample]:
    """Return every ended rollout in the store at `path`, in the order in which they
    were opened. A repeated held-out rollout counts once, with its last attempt.
    `failure_rules`: the run's, for failures that count with a reward."""
    states = _read_ledger_states(read_ledger(path))
    samples: dict[tuple[str, int], Sample] = {}
    with contextlib.closing(RunStore(path)) as store:
        for stored in store.ended_sessions():
            sample = _make_sample(stored, states, failure_rules)
            identity = sample.identity
            key = (identity.session_id, 0)
            if sample.purpose == "eval":
                key = (identity.group_id, identity.index)
            samples.pop(key, None)  # so that the last attempt takes the last position
            samples[key] = sample
    return list(samples.values())


def failed_purposes(path: Path) -> set[str]:
    """Return the purposes of the failed rollouts: "train", "eval". Empty if none
    failed, or if the store at `path` cannot be read."""
    # The outcome is a blob of compact JSON (`rows.py`).
    question = "SELECT DISTINCT purpose FROM sessions WHERE parent_id = '' AND instr(outcome, ?)"
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        ) as store:
            return {
                purpose
                for (purpose,) in store.execute(question, (b'"outcome":"failed"',))
            }
    except sqlite3.Error:
        return set()


@dataclass(frozen=True, slots=True)
class _LedgerState:
    """Fate of one rollout by the ledger."""

    state: str
    step: int | None = None


def _read_ledger_states(
    stored_entries: Iterable[StoredEntry],
) -> Mapping[str, _LedgerState]:
    """Return the fate of each rollout whose session the ledger names, by session id.
    The last entry of the surviving lineage decides. A session that only lost entries
    name is lost."""
    session_ids: dict[Place, str] = {}
    """Session that last ended at a place of the surviving lineage."""
    states: dict[str, _LedgerState] = {}
    for kept in stored_entries:
        entry = kept.entry
        if kept.lost:
            if entry.session_id:
                states.setdefault(entry.session_id, _LedgerState("lost"))
            continue
        # Only the entry caused by an outcome names its session. Later entries of its
        # place belong to it.
        if entry.session_id:
            session_ids[entry.place] = entry.session_id
        session_id = session_ids.get(entry.place)
        if session_id is not None:
            states[session_id] = _state_after(entry, states.get(session_id))
    return states


def _state_after(entry: LedgerEntry, previous: _LedgerState | None) -> _LedgerState:
    """Return the fate of a rollout with this entry; `previous`: with the entry before
    it."""
    state = str(entry.state)
    if entry.reason:
        state += f": {entry.reason}"
    step = None
    if entry.batch_id is not None:
        step = entry.batch_id + 1  # batches are numbered from 0, steps from 1
    elif entry.reason is DropReason.NOT_TRAINED and previous is not None:
        step = previous.step  # it was taken for this step, in a run without a trainer
    return _LedgerState(state, step)


def _make_sample(
    stored: StoredSession,
    states: Mapping[str, _LedgerState],
    rules: Mapping[FailureReason, FailureRule],
) -> Sample:
    session = stored.session
    outcome = stored.outcome
    assert outcome is not None, "only sessions with an outcome are read"
    failed = isinstance(outcome, FailedRollout)
    evaluation = ""
    fate = _LedgerState("served")
    if session.purpose == "train":
        # the ledger has no entry yet for a rollout that has just ended
        fate = states.get(session.id, _LedgerState("failed" if failed else "finished"))
    elif session.purpose == "eval":
        step, evaluation = parse_evaluation(session.group_id, session.task_id)
        fate = _LedgerState("evaluated", step)
    sample = Sample(
        identity=session.identity,
        purpose=session.purpose,
        step=fate.step,
        evaluation=evaluation,
        state=fate.state,
        reward=failure_reward(outcome, session.purpose, rules)
        if failed
        else outcome.reward,
        reward_components={} if failed else outcome.reward_components,
        failure=outcome.reason if failed else None,
        detail=outcome.detail if failed else "",
        opened_at=stored.opened_at,
    )
    summary = outcome.partial if failed else outcome
    if summary is None:
        return sample
    return replace(
        sample,
        num_turns=summary.num_turns,
        sampled_tokens=summary.sampled_tokens,
        cut=summary.truncated,
        oldest_version=summary.oldest_version,
        newest_version=summary.newest_version,
    )


def failure_reward(
    failed: FailedRollout, purpose: Purpose, rules: Mapping[FailureReason, FailureRule]
) -> float | None:
    """Return the reward that a failed rollout counts with; None if it does not
    count."""
    if purpose == "eval":
        return 0.0
    rule = rules.get(failed.reason)
    if isinstance(rule, float) and failed.partial is not None:
        return rule
    return None


def parse_evaluation(group_id: str, task_id: str) -> tuple[int | None, str]:
    """Return step and name of an evaluation, from the id that
    `rollout/dispatch/evaluation.py` gives to its groups:
    eval/<step>/[<set>/]<mode>/<task>."""
    path = group_id.removeprefix(_EVALUATION_PREFIX).removesuffix(f"/{task_id}")
    step, _, name = path.partition("/")
    if not step.isdecimal():
        return None, name
    return int(step), name


def first_ids(task_ids: Iterable[str]) -> dict[str, str]:
    """Return each task id's first id. A task that comes back, in a later epoch for
    example, has a number after its id (`10`, `10@1`, `10@2`)."""
    ids = set(task_ids)
    first: dict[str, str] = {}
    for task_id in ids:
        base, _, number = task_id.rpartition("@")
        first[task_id] = task_id
        if base in ids and number.isdecimal():
            first[task_id] = base
    return first


def steps_with_purpose(samples: Iterable[Sample], purpose: Purpose) -> list[int]:
    """Return the steps that trained the rollouts of training, or that the held-out
    evaluations came after, in order."""
    steps = {
        sample.step
        for sample in samples
        if sample.purpose == purpose and sample.step is not None
    }
    return sorted(steps)


def spread(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return at most `limit` samples (0: all), evenly spaced, including the first and
    the last."""
    count = len(samples)
    if not limit or count <= limit:
        return list(samples)
    if limit == 1:
        return [samples[0]]
    return [
        samples[round(number * (count - 1) / (limit - 1))] for number in range(limit)
    ]


def by_reward(samples: Sequence[Sample], limit: int, *, best: bool) -> list[Sample]:
    """Return at most `limit` (0: all) of the samples that have a reward, the best or
    the worst first. Among samples of equal reward, one of each task comes before the
    second of any task."""
    scored = [sample for sample in samples if sample.reward is not None]
    earlier: Counter[tuple[str, float | None]] = Counter()
    ranks: dict[str, int] = {}
    for sample in scored:
        of_task = (sample.identity.task_id, sample.reward)
        ranks[sample.identity.session_id] = earlier[of_task]
        earlier[of_task] += 1
    scored.sort(key=lambda sample: ranks[sample.identity.session_id])
    scored.sort(key=lambda sample: sample.reward or 0.0, reverse=best)
    return scored[: limit or None]


def distinct_replies(store: RunStore, rollout_ids: Iterable[str]) -> int:
    """Count the rollouts that sampled different tokens, as `step_metrics.reply_metrics`
    does: turns whose reply did not reach the client are ignored."""
    replies: set[tuple[bytes, ...]] = set()
    for rollout_id in rollout_ids:
        sampled: list[bytes] = []
        for session_id in store.family(rollout_id):
            for turn in store.turns(session_id):
                if turn.delivered and turn.finish_reason != "abort":
                    sampled.append(turn.sampled_ids_T.tobytes())
        replies.add(tuple(sampled))
    return len(replies)
