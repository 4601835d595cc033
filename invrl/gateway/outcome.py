"""What a closed session hands over: a summary with its reward, or why there is none. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from invrl.gateway.sessions import SessionRecord
from invrl.types import FailedRollout, FailureReason, Outcome, RolloutSummary, Session, Turn, WeightVersion


def failed(record: SessionRecord, reason: FailureReason, detail: str) -> FailedRollout:
    return FailedRollout(**_place(record.session), reason=reason, detail=detail)


def _place(session: Session) -> dict[str, Any]:
    """The fields of `EndedSession`."""
    names = ("task_id", "group_id", "index", "attempt")
    return {"session_id": session.id, **{name: getattr(session, name) for name in names}}


def summarise(
    record: SessionRecord, turns: Sequence[Turn], delivered: Collection[str], now: float
) -> Outcome:
    """The outcome of finishing `record`. `delivered`: ids of the turns whose answer reached its client.
    Versions are those of the tokens that may be trained. A session without such tokens is EMPTY, a
    training session without a reward BAD_REWARD; others count as reward 0."""
    trained = [turn for turn in turns if turn.id in delivered and turn.trainable]
    versions = [span.version for turn in trained for span in turn.spans if span.end > span.start]
    if not versions:
        return failed(
            record, FailureReason.EMPTY, f"no sampled token reached the client ({len(turns)} turns)"
        )
    if record.reward is None and record.session.purpose == "train":
        return failed(record, FailureReason.BAD_REWARD, "the session was finished without a reward")
    later = [turn for turn in turns if turn.parent_id is not None]
    return RolloutSummary(
        **_place(record.session),
        reward=0.0 if record.reward is None else record.reward,
        reward_components=record.components,
        num_turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        later_prompt_tokens=sum(turn.prompt_tokens for turn in later),
        later_cached_tokens=sum(turn.cached_tokens for turn in later),
        sampled_tokens=sum(len(turn.sampled_ids_T) for turn in turns),
        trained_tokens=sum(len(turn.sampled_ids_T) for turn in trained),
        truncated=any(turn.finish_reason == "length" for turn in trained),
        oldest_version=WeightVersion(min(versions)),
        newest_version=WeightVersion(max(versions)),
        forks=sum(turn.fork_reason != "" for turn in turns),
        counts=record.counts + Counter(f"forks/{turn.fork_reason}" for turn in turns if turn.fork_reason),
        started_at=record.opened_at,
        finished_at=now,
    )
