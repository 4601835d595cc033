"""Builds the outcome of a closed session: a summary with its reward, or the reason of
its failure. Pure.

The turns of a session's finished children are part of its summary."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.conversation_roots import auxiliary_roots, roots
from invrl.types.fields import field_values
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion
from invrl.user_code.frame import USER_FRAME_PREFIX


def failed(record: SessionRecord, reason: FailureReason, detail: str) -> FailedRollout:
    """Return a failure. `detail` is completed with the gateway's refusals of the
    session and its children: an agent may have swallowed them."""
    detail = _with_refusals(
        detail, [text for member in record.family() for text in member.refusals]
    )
    return FailedRollout(
        **field_values(record.session.identity), reason=reason, detail=detail
    )


def _with_refusals(detail: str, refusals: Sequence[str]) -> str:
    """Insert the refusals that the detail lacks before a last line that names user
    code."""
    new_lines = []
    for text in refusals:
        message = text.partition(": ")[2]
        if message not in detail:
            new_lines.append(f"the gateway refused a request: {text}")
    if not new_lines:
        return detail
    lines = detail.rstrip().split("\n")
    if lines[-1].startswith(USER_FRAME_PREFIX):
        return "\n".join([*lines[:-1], *new_lines, lines[-1]])
    return "\n".join([*lines, *new_lines])


def with_partial(
    failure: FailedRollout,
    record: SessionRecord,
    turns: Sequence[Turn],
    delivered: Collection[str],
    now: float,
    *,
    train_auxiliary: bool = True,
) -> FailedRollout:
    """Add a summary of the session's turns, without a final reward, to a failure. Runs
    that give such failures a reward need it."""
    without_reward = replace(record, reward=None, components={})
    partial = summarise(
        without_reward,
        turns,
        delivered,
        now,
        train_auxiliary=train_auxiliary,
        needs_reward=False,
    )
    if isinstance(partial, FailedRollout):
        return failure
    return replace(failure, partial=partial)


def summarise(
    record: SessionRecord,
    turns: Sequence[Turn],
    delivered: Collection[str],
    now: float,
    *,
    train_auxiliary: bool = True,
    needs_reward: bool = True,
) -> Outcome:
    """Return the outcome of a session that is finished at `now` (lived seconds).

    `turns` are the turns of its family. `delivered` has the ids of the turns whose
    answer reached the client. The versions in the summary are those of tokens that may
    be trained. A session without such tokens fails as EMPTY or CONSTRAINED, a training
    session without a reward as BAD_REWARD. The reward is 0 for other sessions without
    one, and for a training session without one if `needs_reward` is False.
    """
    sorted_turns = _sort_turns(turns, delivered, train_auxiliary=train_auxiliary)
    if not sorted_turns.versions:
        return _without_tokens(record, sorted_turns)
    is_top = record.parent is None
    if (
        needs_reward
        and record.reward is None
        and record.session.purpose == "train"
        and is_top
    ):
        return failed(
            record,
            FailureReason.BAD_REWARD,
            "the session was finished without a reward",
        )
    return _summary(record, sorted_turns, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SortedTurns:
    """Turns of a session's family, by what they count for."""

    all: Sequence[Turn]
    later: Sequence[Turn]
    """All but the first of each conversation."""
    auxiliary: Sequence[Turn]
    delivered: Sequence[Turn]
    """Turns whose answer reached the client."""
    trained: Sequence[Turn]
    """Delivered turns whose tokens may be trained."""
    versions: Sequence[WeightVersion]
    """Versions of the tokens that may be trained; empty if there is no such token."""
    untrained_roots: tuple[str, ...]
    """Roots of conversations that are not trained."""


def _sort_turns(
    turns: Sequence[Turn], delivered: Collection[str], *, train_auxiliary: bool
) -> _SortedTurns:
    root_of = roots(turns)
    roots_of_auxiliary = dict.fromkeys(auxiliary_roots(turns, delivered))
    untrained_roots: Mapping[str, None] = {}
    if not train_auxiliary:
        untrained_roots = roots_of_auxiliary
    delivered_turns = [turn for turn in turns if turn.id in delivered]
    trained: list[Turn] = []
    for turn in delivered_turns:
        if turn.trainable and root_of[turn.id] not in untrained_roots:
            trained.append(turn)
    return _SortedTurns(
        all=turns,
        later=[turn for turn in turns if turn.parent_id is not None],
        auxiliary=[turn for turn in turns if root_of[turn.id] in roots_of_auxiliary],
        delivered=delivered_turns,
        trained=trained,
        versions=[
            span.version
            for turn in trained
            for span in turn.spans
            if span.end > span.start
        ],
        untrained_roots=tuple(untrained_roots),
    )


def _summary(record: SessionRecord, turns: _SortedTurns, now: float) -> RolloutSummary:
    rewards = _family_rewards(record, turns.all)
    fork_counts = Counter(
        f"forks/{turn.fork_reason}" for turn in turns.all if turn.fork_reason
    )
    return RolloutSummary(
        **field_values(record.session.identity),
        reward=rewards.final,
        reward_components=record.components,
        num_turns=len(turns.all),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns.all),
        cached_tokens=sum(turn.cached_tokens for turn in turns.all),
        later_prompt_tokens=sum(turn.prompt_tokens for turn in turns.later),
        later_cached_tokens=sum(turn.cached_tokens for turn in turns.later),
        sampled_tokens=_sampled_tokens(turns.all),
        delivered_tokens=_sampled_tokens(turns.delivered),
        auxiliary_tokens=_sampled_tokens(turns.auxiliary),
        trained_tokens=_sampled_tokens(turns.trained),
        truncated=any(turn.finish_reason == "length" for turn in turns.trained),
        oldest_version=min(turns.versions),
        newest_version=max(turns.versions),
        forks=fork_counts.total(),
        counts=record.counts + fork_counts,
        started_at=record.opened_at,
        finished_at=record.opened_at + now - record.awake_at_opening,
        turn_rewards=rewards.of_turns,
        branch_rewards=rewards.of_trajectories,
        turn_levels=rewards.turn_levels,
        child_rewards=rewards.of_children,
        child_reward_from=rewards.children_take_from,
        untrained_roots=turns.untrained_roots,
        numbers=dict(record.numbers),
        turn_numbers=_family_turn_numbers(record),
    )


def _family_turn_numbers(record: SessionRecord) -> Mapping[str, Mapping[str, float]]:
    """Return numbers by turn id, then by name, of the turns of the session and its
    finished descendants."""
    turn_numbers: dict[str, Mapping[str, float]] = {}
    for member in record.family(finished=True):
        for turn_id, numbers in member.turn_numbers.items():
            turn_numbers[turn_id] = dict(numbers)
    return turn_numbers


def _without_tokens(record: SessionRecord, turns: _SortedTurns) -> FailedRollout:
    """Return the failure of a session that has no token to train."""
    all_skipped = all(turn.constrained and not turn.grammar for turn in turns.delivered)
    setting_applies = record.session.purpose != "serve"
    if turns.delivered and all_skipped and setting_applies:
        forced = Counter[str]()
        for member in record.family():
            forced += member.forced
        return failed(record, FailureReason.CONSTRAINED, _explain_constraint(forced))
    return failed(record, FailureReason.EMPTY, _count_untrained_tokens(turns))


def _explain_constraint(forced: Mapping[str, int]) -> str:
    """Explain a constrained session. `forced` counts requests by the field that forced
    their replies. It is empty after the gateway has restarted."""
    fields = " and ".join(sorted(forced)) or "tool_choice or response_format"
    return (
        f"all turns constrained: the client sends {fields}, and --gateway.constrained skip trains no reply that a "
        "grammar forced; start the run with --gateway.constrained free, or let the client leave the choice to the "
        "model (tool_choice auto, no response_format; pydantic-ai: PromptedOutput, instructor: Mode.MD_JSON)"
    )


def _count_untrained_tokens(turns: _SortedTurns) -> str:
    """Count each sampled token under one reason. Tokens for which no other reason
    applies are under untrained roots."""
    if not turns.all:
        return (
            "no token to train: the model was never asked in this session, or never answered. Ask at its "
            "base URL with its key; in a rollout function: endpoint.openai()"
        )
    sampled = _sampled_tokens(turns.all)
    delivered = _sampled_tokens(turns.delivered)
    trainable = _sampled_tokens(turn for turn in turns.delivered if turn.trainable)
    return (
        f"no token to train: of {sampled} sampled in {len(turns.all)} turns {sampled - delivered} did not "
        f"reach the client, {delivered - trainable} were constrained or aborted, {trainable} are of "
        "auxiliary conversations"
    )


def token_counts(
    turns: Sequence[Turn], delivered: Collection[str], outcome: Outcome
) -> Mapping[str, int]:
    """Count the sampled, delivered and trained tokens of one closed session."""
    trained = 0
    if not isinstance(outcome, FailedRollout):
        trained = outcome.trained_tokens
    return {
        "sampled": _sampled_tokens(turns),
        "delivered": _sampled_tokens(turn for turn in turns if turn.id in delivered),
        "trained": trained,
    }


def token_shares(counts: Mapping[str, int]) -> Mapping[str, float]:
    """Return the delivered and the trained share of the tokens that closed sessions
    sampled. `counts` are sums of `token_counts`."""
    sampled = max(counts.get("sampled", 0), 1)
    return {
        f"{name}_fraction": counts.get(name, 0) / sampled
        for name in ("delivered", "trained")
    }


def _sampled_tokens(turns: Sequence[Turn] | Iterator[Turn]) -> int:
    return sum(len(turn.sampled_ids_T) for turn in turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FinalReward:
    """Final reward that counts for a session, and the session that it was given to."""

    value: float
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyRewards:
    """Rewards of a session and its finished descendants, as `RolloutSummary` holds
    them."""

    final: float
    of_turns: Mapping[str, float]
    of_trajectories: Mapping[str, float]
    turn_levels: Mapping[str, str]
    of_children: Mapping[str, float]
    children_take_from: Mapping[str, str]


def _family_rewards(record: SessionRecord, turns: Sequence[Turn]) -> _FamilyRewards:
    finals = dict(_final_rewards(record))
    own = finals.pop(record.session.id)
    of_turns: dict[str, float] = {}
    of_trajectories: dict[str, float] = {}
    for member in record.family(finished=True):
        for turn_id, reward in member.turn_rewards.items():
            of_turns[turn_id] = reward.value
        for turn_id, reward in member.branch_rewards.items():
            of_trajectories[turn_id] = reward.value
    levels = _levels(record, turns)
    rewarded_turns = [*of_turns, *of_trajectories]
    return _FamilyRewards(
        final=own.value,
        of_turns=of_turns,
        of_trajectories=of_trajectories,
        turn_levels={
            turn_id: levels[turn_id] for turn_id in rewarded_turns if turn_id in levels
        },
        of_children={child: reward.value for child, reward in finals.items()},
        children_take_from={
            child: reward.session_id for child, reward in finals.items()
        },
    )


def _final_rewards(
    record: SessionRecord, inherited: _FinalReward | None = None
) -> Iterator[tuple[str, _FinalReward]]:
    """Yield the final reward of each session of the family, by session id: its own, or
    else its parent's. If `record`, the first session, has none, its reward is 0."""
    if record.reward is not None:
        reward = _FinalReward(value=record.reward, session_id=record.session.id)
    elif inherited is not None:
        reward = inherited
    else:
        reward = _FinalReward(value=0.0, session_id=record.session.id)
    yield record.session.id, reward
    for child in record.children:
        if child.state == "finished":
            yield from _final_rewards(child, reward)


def _levels(record: SessionRecord, turns: Sequence[Turn]) -> Mapping[str, str]:
    """Return the level of each turn, by turn id: "main" for the session's own turns or
    "child" for a child's, and the number of turns before it on its trajectory. Parents
    come before their children in `turns`."""
    depths: dict[str, int] = {}
    levels: dict[str, str] = {}
    for turn in turns:
        depth = 0
        if turn.parent_id is not None:
            depth = depths[turn.parent_id] + 1
        depths[turn.id] = depth
        owner = "child"
        if turn.session_id == record.session.id:
            owner = "main"
        levels[turn.id] = f"{owner}/{depth}"
    return levels
