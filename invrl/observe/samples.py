"""The rollouts of a run as samples to look at: which there are, and which of them to show. For live and ended
runs; nothing is written.

A training rollout's step is the one that trained it, along the surviving lineage of the ledger; a held-out
one's is the step that its evaluation came after (0: before training). What was dropped has no step."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from invrl.buffer.config import FailureRule
from invrl.buffer.ledger_store import read_ledger
from invrl.buffer.open_group import RolloutState
from invrl.observe.transcript import read_transcript
from invrl.store.rows import StoredSession
from invrl.store.run_store import RunStore
from invrl.types import DropReason, FailedRollout, FailureReason, Place, Purpose, RolloutSummary

if TYPE_CHECKING:
    from invrl.buffer.ledger_store import KeptEntry

_EVALUATION = "eval/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout that has ended."""

    rollout_id: str
    """Its session's id."""
    task_id: str
    group_id: str
    index: int
    attempt: int
    purpose: Purpose
    step: int | None
    """None where no step trained it, or it is of `invrl serve`."""
    evaluation: str = ""
    """Of a held-out rollout: "<mode>", or "<set>/<mode>"."""
    state: str
    """What became of it: trained, finished, grouped, taken, dropped (with the reason), failed, lost (a later
    incarnation of the run went on from before it), evaluated, served."""
    reward: float | None
    """None where it failed and does not count."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    failure: FailureReason | None = None
    detail: str = ""
    """What the failure says."""
    num_turns: int = 0
    sampled_tokens: int = 0
    cut: bool = False
    """A reply of it ran out of tokens."""
    oldest_version: int | None = None
    newest_version: int | None = None
    opened_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One task at two times of a run: all its rollouts there, and one of them with what it said."""

    task_id: str
    evaluation: str
    """As in `Sample`; "" for training rollouts."""
    reward_before: float
    """Mean of the rollouts at that time."""
    reward_after: float
    before: Sample
    after: Sample
    likeness: float
    """Of what the two said: 0 nothing in common, 1 equal (difflib's ratio)."""

    @property
    def gain(self) -> float:
        return self.reward_after - self.reward_before


def read_samples(path: Path, failure_rules: Mapping[FailureReason, FailureRule]) -> list[Sample]:
    """Every rollout in the store at `path` that has ended, in the order of their opening. `failure_rules`:
    the run's, for failures that count with a reward. Of a held-out rollout that was made again, the last."""
    fates = _fates(read_ledger(path))
    store = RunStore(path)
    samples: dict[tuple[object, ...], Sample] = {}
    try:
        for stored in store.ended_sessions():
            sample = _sample(stored, fates, failure_rules)
            place = (sample.group_id, sample.index) if sample.purpose == "eval" else (sample.rollout_id,)
            samples.pop(place, None)
            samples[place] = sample
    finally:
        store.close()
    return list(samples.values())


@dataclass(frozen=True, slots=True)
class _Fate:
    state: str
    step: int | None = None


def _fates(kept: Iterable[KeptEntry]) -> Mapping[str, _Fate]:
    """By session id: what the ledger says of each rollout that it knows the session of."""
    session_of: dict[tuple[bool, Place], str] = {}
    fates: dict[str, _Fate] = {}
    for one in kept:
        entry = one.entry
        key = (one.lost, entry.place)
        if entry.session_id:
            session_of[key] = entry.session_id
        session_id = session_of.get(key) or session_of.get((False, entry.place), "")
        if not session_id:
            continue
        if one.lost:
            fates.setdefault(session_id, _Fate("lost"))
            continue
        step = None
        if entry.state in (RolloutState.TAKEN, RolloutState.TRAINED) and entry.batch_id is not None:
            step = entry.batch_id + 1
        elif entry.state is RolloutState.DROPPED and entry.reason is DropReason.NOT_TRAINED:
            step = fates[session_id].step if session_id in fates else None
        reason = f": {entry.reason}" if entry.reason else ""
        fates[session_id] = _Fate(f"{entry.state}{reason}", step)
    return fates


def _sample(
    stored: StoredSession, fates: Mapping[str, _Fate], rules: Mapping[FailureReason, FailureRule]
) -> Sample:
    session, outcome = stored.session, stored.outcome
    assert outcome is not None, "only sessions with an outcome are read"
    step: int | None = None
    evaluation = ""
    if session.purpose == "train":
        fate = fates.get(session.id, _Fate("failed" if isinstance(outcome, FailedRollout) else "finished"))
        state = fate.state
        step = fate.step
    elif session.purpose == "eval":
        state = "evaluated"
        step, evaluation = _evaluation_of(session.group_id, session.task_id)
    else:
        state = "served"
    summary: RolloutSummary | None
    reward: float | None = None
    failure: FailureReason | None = None
    detail = ""
    if isinstance(outcome, FailedRollout):
        summary = outcome.partial
        failure = outcome.reason
        detail = outcome.detail
        rule = rules.get(failure)
        if session.purpose == "eval":
            reward = 0.0
        elif isinstance(rule, float) and summary is not None:
            reward = rule
    else:
        summary = outcome
        reward = outcome.reward
    return Sample(
        rollout_id=session.id,
        task_id=session.task_id,
        group_id=session.group_id,
        index=session.index,
        attempt=session.attempt,
        purpose=session.purpose,
        step=step,
        evaluation=evaluation,
        state=state,
        reward=reward,
        reward_components={} if summary is None or failure is not None else summary.reward_components,
        failure=failure,
        detail=detail,
        num_turns=0 if summary is None else summary.num_turns,
        sampled_tokens=0 if summary is None else summary.sampled_tokens,
        cut=summary is not None and summary.truncated,
        oldest_version=None if summary is None else summary.oldest_version,
        newest_version=None if summary is None else summary.newest_version,
        opened_at=stored.opened_at,
    )


def _evaluation_of(group_id: str, task_id: str) -> tuple[int | None, str]:
    """Step and name of an evaluation, from the id that `evaluate.py` gives to its groups:
    eval/<step>/[<set>/]<mode>/<task>."""
    step, _, rest = group_id.removeprefix(_EVALUATION).removesuffix(f"/{task_id}").partition("/")
    return (int(step) if step.isdecimal() else None), rest


def trained_steps(samples: Iterable[Sample]) -> list[int]:
    """The steps of the training rollouts, in order."""
    return sorted({one.step for one in samples if one.purpose == "train" and one.step is not None})


def evaluated_steps(samples: Iterable[Sample]) -> list[int]:
    """The steps that an evaluation came after, in order."""
    return sorted({one.step for one in samples if one.purpose == "eval" and one.step is not None})


def spread(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """At most `limit` (0: all), evenly over the whole row, the first and the last of which are among them."""
    count = len(samples)
    if not limit or count <= limit:
        return list(samples)
    if limit == 1:
        return [samples[0]]
    return [samples[round(at * (count - 1) / (limit - 1))] for at in range(limit)]


def by_reward(samples: Sequence[Sample], limit: int, *, best: bool) -> list[Sample]:
    """At most `limit` (0: all) of those that have a reward, the best or the worst first. Of equal rewards one
    of each task comes before the second of any."""
    seen: dict[str, int] = defaultdict(int)
    turn_of: dict[str, int] = {}
    scored = [one for one in samples if one.reward is not None]
    for one in scored:
        turn_of[one.rollout_id] = seen[f"{one.task_id} {one.reward}"]
        seen[f"{one.task_id} {one.reward}"] += 1
    sign = -1.0 if best else 1.0
    ordered = sorted(scored, key=lambda one: (sign * (one.reward or 0.0), turn_of[one.rollout_id]))
    return ordered[:limit] if limit else ordered


def first_ids(task_ids: Iterable[str]) -> dict[str, str]:
    """By the id of each task, the id that it had when it came first: a task that comes back, in a later epoch
    say, has its number behind it (`10`, `10@1`, `10@2`)."""
    ids = set(task_ids)
    found = dict[str, str]()
    for each in ids:
        before, _, number = each.rpartition("@")
        found[each] = before if before in ids and number.isdecimal() else each
    return found


def changes(samples: Sequence[Sample], store: RunStore) -> list[Change]:
    """The tasks that changed between their first and their last time, the largest change first: by how far
    their mean reward moved, and where it moved as far, by how little of what was said is alike.

    A time of a held-out task is an evaluation; only the same set and mode are compared. A time of a training
    task is a group of it, whatever became of the group, also in a later epoch. Both times must be of
    different weights. Tasks without two such times are left out, and those with equal rewards and the same
    words. At each time the rollout whose reward is nearest to the mean speaks for all."""
    names = first_ids(one.task_id for one in samples)
    times: dict[tuple[str, str], dict[object, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        if one.reward is None or one.newest_version is None or one.purpose == "serve":
            continue
        time = one.step if one.purpose == "eval" else one.group_id
        times[names[one.task_id], one.evaluation][time].append(one)
    found: list[Change] = []
    for (task_id, evaluation), of_task in times.items():
        groups = sorted(of_task.values(), key=_when)
        first, last = groups[0], groups[-1]
        if _when(first)[0] >= _when(last)[0]:
            continue
        change = _change(task_id, evaluation, first, last, store)
        if change.gain or change.likeness < 1.0:
            found.append(change)
    return sorted(found, key=lambda one: (-abs(one.gain), one.likeness))


def _when(group: Sequence[Sample]) -> tuple[int, float]:
    """The newest weights of a group, and when it was begun."""
    return max(one.newest_version or 0 for one in group), min(one.opened_at for one in group)


def _change(
    task_id: str, evaluation: str, first: Sequence[Sample], last: Sequence[Sample], store: RunStore
) -> Change:
    before, reward_before = _spokesman(first)
    after, reward_after = _spokesman(last)
    texts = [read_transcript(store, one.rollout_id).replies for one in (before, after)]
    return Change(
        task_id=task_id,
        evaluation=evaluation,
        reward_before=reward_before,
        reward_after=reward_after,
        before=before,
        after=after,
        likeness=likeness(*texts),
    )


def _spokesman(group: Sequence[Sample]) -> tuple[Sample, float]:
    """The rollout whose reward is nearest to the group's mean, the first of such, and that mean."""
    mean = fmean(one.reward or 0.0 for one in group)
    return min(group, key=lambda one: (abs((one.reward or 0.0) - mean), one.index)), mean


_COMPARED = 500
"""Characters of each text: difflib's time grows with their product."""


def likeness(one: str, other: str) -> float:
    """0 for texts with nothing in common, 1 for equal ones, by their beginnings."""
    if one == other:
        return 1.0
    ratio = difflib.SequenceMatcher(None, one[:_COMPARED], other[:_COMPARED], autojunk=False).ratio()
    return min(ratio, 1.0 - 1e-9)


def distinct_replies(store: RunStore, rollout_ids: Iterable[str]) -> int:
    """How many of these rollouts sampled different tokens, as `step_metrics.reply_metrics` counts them: turns
    whose answer did not reach the client are left out."""
    said: set[tuple[bytes, ...]] = set()
    for rollout_id in rollout_ids:
        turns = [turn for member in store.family(rollout_id) for turn in store.turns(member)]
        counted = (turn for turn in turns if turn.delivered and turn.finish_reason != "abort")
        said.add(tuple(turn.sampled_ids_T.tobytes() for turn in counted))
    return len(said)
