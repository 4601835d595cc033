"""What a closed session hands over: a summary with its reward, or why there is none. Pure.

The turns of a session's finished children are part of it. A root turn begins a conversation; the one with the
most tokens that its client was given is a session's main one, others (titles, summaries, parallel ones) are
auxiliary."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from invrl.gateway.registry import SessionRecord
from invrl.gateway.types import ForkReason
from invrl.types import FailedRollout, FailureReason, Outcome, RolloutSummary, Session, Turn, WeightVersion


def failed(record: SessionRecord, reason: FailureReason, detail: str) -> FailedRollout:
    return FailedRollout(**_place(record.session), reason=reason, detail=detail)


def with_partial(
    failure: FailedRollout,
    record: SessionRecord,
    turns: Sequence[Turn],
    delivered: Collection[str],
    now: float,
    *,
    train_auxiliary: bool = True,
) -> FailedRollout:
    """The failure with what its session's turns are worth, for a run that gives such failures a reward."""
    without_final = replace(record, reward=None, components={})
    whole = summarise(
        without_final, turns, delivered, now, train_auxiliary=train_auxiliary, needs_reward=False
    )
    return replace(failure, partial=whole) if isinstance(whole, RolloutSummary) else failure


def _place(session: Session) -> dict[str, Any]:
    """The fields of `EndedSession`."""
    names = ("task_id", "group_id", "index", "attempt")
    return {"session_id": session.id, **{name: getattr(session, name) for name in names}}


def summarise(
    record: SessionRecord,
    turns: Sequence[Turn],
    delivered: Collection[str],
    now: float,
    *,
    train_auxiliary: bool = True,
    needs_reward: bool = True,
) -> Outcome:
    """The outcome of finishing `record`. `turns`: the family's; `delivered`: ids of those whose answer
    reached its client. Versions are those of the tokens that may be trained. A session without such tokens
    is EMPTY, a training session without a reward BAD_REWARD; others count as reward 0, as it does without
    `needs_reward`."""
    root_of, auxiliary = roots(turns), dict.fromkeys(auxiliary_roots(turns, delivered))
    untrained = {} if train_auxiliary else auxiliary
    arrived = [turn for turn in turns if turn.id in delivered]
    trained = [turn for turn in arrived if turn.trainable and root_of[turn.id] not in untrained]
    versions = [span.version for turn in trained for span in turn.spans if span.end > span.start]
    if not versions:
        skipped = all(turn.constrained and not turn.grammar for turn in arrived)
        if arrived and skipped and record.session.purpose != "serve":  # where the setting has no effect
            forced = sum((one.forced for one in record.family()), Counter[str]())
            return failed(record, FailureReason.CONSTRAINED, _why_constrained(forced))
        return failed(record, FailureReason.EMPTY, _why_empty(turns, arrived))
    top = record.parent is None
    if needs_reward and record.reward is None and record.session.purpose == "train" and top:
        return failed(record, FailureReason.BAD_REWARD, "the session was finished without a reward")
    later = [turn for turn in turns if turn.parent_id is not None]
    finals, family = dict(_finals(record)), list(record.family(finished=True))
    reward, _ = finals.pop(record.session.id)
    turn_rewards = {turn_id: own.value for one in family for turn_id, own in one.turn_rewards.items()}
    branch_rewards = {turn_id: own.value for one in family for turn_id, own in one.branch_rewards.items()}
    levels = _levels(record, turns)
    return RolloutSummary(
        **_place(record.session),
        reward=reward,
        reward_components=record.components,
        num_turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        later_prompt_tokens=sum(turn.prompt_tokens for turn in later),
        later_cached_tokens=sum(turn.cached_tokens for turn in later),
        sampled_tokens=_sampled(turns),
        delivered_tokens=_sampled(arrived),
        auxiliary_tokens=_sampled(turn for turn in turns if root_of[turn.id] in auxiliary),
        trained_tokens=_sampled(trained),
        truncated=any(turn.finish_reason == "length" for turn in trained),
        oldest_version=WeightVersion(min(versions)),
        newest_version=WeightVersion(max(versions)),
        forks=sum(turn.fork_reason != "" for turn in turns),
        counts=record.counts + Counter(f"forks/{turn.fork_reason}" for turn in turns if turn.fork_reason),
        started_at=record.opened_at,
        finished_at=now,
        turn_rewards=turn_rewards,
        branch_rewards=branch_rewards,
        turn_levels={id: levels[id] for id in (*turn_rewards, *branch_rewards) if id in levels},
        child_rewards={child: value for child, (value, _) in finals.items()},
        child_reward_from={child: bearer for child, (_, bearer) in finals.items()},
        untrained_roots=tuple(untrained),
    )


def _why_constrained(forced: Mapping[str, int]) -> str:
    """`forced`: requests by what forced their replies; empty after a restart of the gateway."""
    asked = " and ".join(sorted(forced)) or "tool_choice or response_format"
    return (
        f"all turns constrained: the client sends {asked}, and --constrained skip trains no reply that a "
        "grammar forced; start the run with --constrained free, or let the client leave the choice to the "
        "model (tool_choice auto, no response_format; pydantic-ai: PromptedOutput, instructor: Mode.MD_JSON)"
    )


def _why_empty(turns: Sequence[Turn], arrived: Sequence[Turn]) -> str:
    """Each token that was sampled is counted under one reason: what is left stands under untrained roots."""
    free = _sampled(turn for turn in arrived if turn.trainable)
    sampled, reached = _sampled(turns), _sampled(arrived)
    return (
        f"no token to train: of {sampled} sampled in {len(turns)} turns {sampled - reached} did not reach "
        f"the client, {reached - free} were constrained or aborted, {free} are of auxiliary conversations"
    )


def token_counts(turns: Sequence[Turn], delivered: Collection[str], outcome: Outcome) -> Mapping[str, int]:
    return {
        "sampled": _sampled(turns),
        "delivered": _sampled(turn for turn in turns if turn.id in delivered),
        "trained": 0 if isinstance(outcome, FailedRollout) else outcome.trained_tokens,
    }


def token_shares(counts: Mapping[str, int]) -> Mapping[str, float]:
    """Of the tokens sampled in closed sessions; `counts`: sums of `token_counts`."""
    sampled = max(counts.get("sampled", 0), 1)
    return {f"{name}_fraction": counts.get(name, 0) / sampled for name in ("delivered", "trained")}


def roots(turns: Sequence[Turn]) -> Mapping[str, str]:
    """Of each turn, the root it stands under. Parents come before their children."""
    root_of: dict[str, str] = {}
    for turn in turns:
        root_of[turn.id] = turn.id if turn.parent_id is None else root_of[turn.parent_id]
    return root_of


def auxiliary_roots(turns: Sequence[Turn], delivered: Collection[str]) -> tuple[str, ...]:
    """Roots of every conversation but its session's main one, which is the one with the most tokens that were
    delivered whole: what was abandoned or aborted says nothing of what the agent was about. Roots with equal
    prompts are samples of one conversation. A root that departed from what was recorded (edited history,
    stripped thinking) belongs to the conversation whose beginning it shares most of."""
    root_of = roots(turns)
    answered = Counter[str]()
    """Delivered tokens under each root."""
    for turn in turns:
        if turn.id in delivered and turn.finish_reason != "abort":
            answered[root_of[turn.id]] += len(turn.sampled_ids_T)
    auxiliary: list[str] = []
    for session_id in dict.fromkeys(turn.session_id for turn in turns):
        begun = [turn for turn in turns if turn.session_id == session_id and turn.parent_id is None]
        home = _homes(begun)
        size = Counter[str]()
        for turn in begun:
            size[home[turn.id]] += answered[turn.id]
        main = max(size, key=lambda first: size[first])
        auxiliary += [turn.id for turn in begun if home[turn.id] != main]
    return tuple(auxiliary)


def _homes(begun: Sequence[Turn]) -> Mapping[str, str]:
    """Of each root of a session, the root that began its conversation."""
    new = [turn for turn in begun if turn.fork_reason in ("", ForkReason.NEW_CONVERSATION)] or begun
    firsts: dict[bytes, Turn] = {}
    home: dict[str, str] = {}
    for turn in new:
        first = firsts.setdefault(turn.context_ids_T.tobytes(), turn)
        home[turn.id] = first.id
    for turn in begun:
        if turn.id not in home:
            home[turn.id] = max(firsts.values(), key=lambda first: _shared(first, turn)).id
    return home


def _shared(one: Turn, other: Turn) -> int:
    """Tokens that two contexts begin with alike."""
    length = min(len(one.context_ids_T), len(other.context_ids_T))
    differ = np.flatnonzero(one.context_ids_T[:length] != other.context_ids_T[:length])
    return int(differ[0]) if len(differ) else length


def _sampled(turns: Sequence[Turn] | Iterator[Turn]) -> int:
    return sum(len(turn.sampled_ids_T) for turn in turns)


def _finals(
    record: SessionRecord, inherited: tuple[float, str] | None = None
) -> Iterator[tuple[str, tuple[float, str]]]:
    """Of each session of the family its final reward, its own or else its parent's, and the session that the
    reward was given to. A family's first session without a reward has 0."""
    bearer = (0.0 if record.reward is None else record.reward, record.session.id)
    if record.reward is None and inherited is not None:
        bearer = inherited
    yield record.session.id, bearer
    for child in record.children:
        if child.state == "finished":
            yield from _finals(child, bearer)


def _levels(record: SessionRecord, turns: Sequence[Turn]) -> Mapping[str, str]:
    """Of each turn, whether it is of the session itself or of a child's, and how many turns come before it on
    its branch. Parents come before their children."""
    depths: dict[str, int] = {}
    levels: dict[str, str] = {}
    for turn in turns:
        depths[turn.id] = 0 if turn.parent_id is None else depths[turn.parent_id] + 1
        place = "main" if turn.session_id == record.session.id else "child"
        levels[turn.id] = f"{place}/{depths[turn.id]}"
    return levels
