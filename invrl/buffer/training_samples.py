"""From a taken batch and its tokens to a TrainBatch. Pure; called by the loop's process.

One row per branch of a rollout, its child sessions' branches among them. Invariant: a sampled token is
trained in exactly one row. A turn that several branches share is trained in the first of them and is
context in the others. What is not trained: a turn whose answer never reached the client, or that was
aborted. At the end of a branch such turns are cut off; inside it they stay as context, because what follows
was conditioned on them.

Whose reward counts for a token: its turn's own, else its branch's (the deepest turn of the branch that was
given one), else its child session's, else the rollout's final one; or, with the use "add", all of them, where
a turn also has the rewards of the turns that follow it. Each reward's advantage comes from the rewards of its
own kind (`comparison.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.buffer.comparison import RewardOwner, child_owner, comparisons
from invrl.buffer.config import RewardBaseline, RewardUse
from invrl.errors import BufferStateError, PluginError
from invrl.interfaces import AdvantageFn
from invrl.types import GrammarSpan, Rollout, RolloutSummary, TakenBatch, TrainBatch, TrainSample, Turn


def build_batch(
    taken: TakenBatch,
    rollouts: Iterable[Rollout],
    advantage_fn: AdvantageFn,
    eps: float,
    *,
    baseline: RewardBaseline = "depth",
    use: RewardUse = "replace",
) -> TrainBatch:
    """Rows with their advantages, in the order of the groups: a reward's advantage stands on each trained
    token that it counts for, and the rollout counts once in its group's baseline however many rows it became.

    `use` "replace": the most particular reward that a token has stands in the place of all others. "add": the
    sum of the advantages of its final, child's and branch's reward and of the turn rewards from its own turn
    to the end of its row; with `baseline` "group" and turn rewards only, that is process supervision of GRPO
    (arXiv 2402.03300, section 4.1.3).

    Raises BufferStateError if the tokens of a taken rollout are missing, PluginError if the advantage
    function returns anything but one finite number per rollout."""
    by_session = {rollout.summary.session_id: rollout for rollout in rollouts}
    samples: list[TrainSample] = []
    advantages: list[NDArray[np.float32]] = []
    for group in taken.groups:
        known: dict[RewardOwner, float] = {}
        for comparison in comparisons(group, baseline):
            values = _group_advantages(comparison.rewards_R, advantage_fn, eps)
            known.update(zip(comparison.owners, values, strict=True))
        for summary in group.rollouts_G:
            rollout = by_session.get(summary.session_id)
            if rollout is None:
                place = f"session {summary.session_id} of group {group.id}"
                raise BufferStateError(f"batch {taken.batch_id}: no tokens for {place}")
            for branch in _branches(rollout):
                samples.append(branch.sample)
                advantages.append(_token_advantages(branch, summary, known, use))
    return TrainBatch(
        batch_id=taken.batch_id,
        version=taken.version,
        samples=tuple(samples),
        advantages=tuple(advantages),
        total_tokens=sum(int(sample.loss_mask_T.sum()) for sample in samples),
    )


def samples_from_rollout(rollout: Rollout) -> list[TrainSample]:
    """One row per branch that has something left to train; none for a rollout without trained tokens."""
    return [branch.sample for branch in _branches(rollout)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Branch:
    """A row, and the turns of its whole branch: those of the row, and untrained ones after them."""

    sample: TrainSample
    turns: tuple[Turn, ...]


def _branches(rollout: Rollout) -> list[_Branch]:
    trained_roots = [
        trajectory
        for trajectory in rollout.trajectories
        if trajectory.turns[0].id not in rollout.summary.untrained_roots
    ]
    paths = [_without_untrained_end(trajectory.turns) for trajectory in trained_roots]
    ids = [tuple(turn.id for turn in path) for path in paths]
    branches: list[_Branch] = []
    trained: set[str] = set()
    for k, path in enumerate(paths):
        longer = any(len(other) > len(ids[k]) and other[: len(ids[k])] == ids[k] for other in ids)
        fresh = {turn.id for turn in path if _trainable(turn)} - trained
        if longer or not fresh:
            continue
        sample = _row(rollout, path, fresh, _branch_reward(rollout.summary, trained_roots[k].turns))
        if sample.loss_mask_T.any():
            branches.append(_Branch(sample=sample, turns=trained_roots[k].turns))
            trained |= fresh
    return branches


def _trainable(turn: Turn) -> bool:
    return turn.delivered and turn.trainable


def _without_untrained_end(turns: Sequence[Turn]) -> Sequence[Turn]:
    end = len(turns)
    while end and not _trainable(turns[end - 1]):
        end -= 1
    return turns[:end]


def _branch_reward(summary: RolloutSummary, turns: Sequence[Turn]) -> float:
    given = [summary.branch_rewards[turn.id] for turn in turns if turn.id in summary.branch_rewards]
    return given[-1] if given else summary.child_rewards.get(turns[0].session_id, summary.reward)


def _reward_owners(summary: RolloutSummary, turns: Sequence[Turn]) -> list[RewardOwner]:
    """Whose rewards count for the tokens of a branch, but for those of single turns: from the whole rollout's
    to the most particular one."""
    owners = [RewardOwner("final", summary.session_id)]
    session = child_owner(summary, turns[0].session_id)
    if session.kind == "child":
        owners.append(session)
    branch_turns = [turn.id for turn in turns if turn.id in summary.branch_rewards]
    if branch_turns:
        owners.append(RewardOwner("branch", branch_turns[-1]))
    return owners


def _token_advantages(
    branch: _Branch, summary: RolloutSummary, known: Mapping[RewardOwner, float], use: RewardUse
) -> NDArray[np.float32]:
    """[T], 0 where nothing is trained."""
    owners = _reward_owners(summary, branch.turns)
    whole = sum(known[owner] for owner in owners) if use == "add" else known[owners[-1]]
    by_turn: dict[str, float] = {}
    following = 0.0
    for turn in reversed(branch.turns):
        own = known.get(RewardOwner("turn", turn.id))
        following += own or 0.0
        if use == "add":
            by_turn[turn.id] = whole + following
        else:
            by_turn[turn.id] = whole if own is None else own
    parts = []
    for turn in branch.turns[: len(branch.sample.turn_ids)]:
        parts.append(np.zeros(len(turn.context_ids_T), np.float32))
        parts.append(np.full(len(turn.sampled_ids_T), by_turn[turn.id], np.float32))
    return np.where(branch.sample.loss_mask_T, np.concatenate(parts), np.float32(0.0))


def _row(rollout: Rollout, path: Sequence[Turn], fresh: set[str], reward: float) -> TrainSample:
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    grammars: list[GrammarSpan] = []
    start = 0
    for turn in path:
        context, sampled = len(turn.context_ids_T), len(turn.sampled_ids_T)
        trains = turn.id in fresh
        end = start + context + sampled
        if trains and turn.grammar:
            grammars.append(GrammarSpan(start=start + context, end=end, grammar=turn.grammar))
        start = end
        tokens += [turn.context_ids_T, turn.sampled_ids_T]
        masks += [np.zeros(context, np.bool_), np.full(sampled, trains)]
        logprobs += [np.zeros(context, np.float32), turn.logprobs_T]
        versions += [np.full(context, -1, np.int32), turn.versions_T]
    mask_T = np.concatenate(masks)
    mask_T[:1] = False  # nothing comes before the first token, so it has no log-prob
    return TrainSample(
        tokens_T=np.concatenate(tokens).astype(np.int32, copy=False),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, np.concatenate(logprobs), 0).astype(np.float32, copy=False),
        versions_T=np.where(mask_T, np.concatenate(versions), -1).astype(np.int32, copy=False),
        reward=reward,
        temperature=_temperature(rollout, path),
        group_id=rollout.summary.group_id,
        rollout_id=rollout.summary.session_id,
        attempt=rollout.summary.attempt,
        turn_ids=tuple(turn.id for turn in path),
        grammars=tuple(grammars),
    )


def _temperature(rollout: Rollout, path: Sequence[Turn]) -> float:
    """The trainer divides a row's logits by one number, which the run pins."""
    temperatures = {turn.temperature for turn in path}
    if len(temperatures) != 1:
        session = rollout.summary.session_id
        raise BufferStateError(f"session {session} was sampled at several temperatures: {temperatures}")
    return temperatures.pop()


def _group_advantages(rewards_G: NDArray[np.float64], function: AdvantageFn, eps: float) -> Sequence[float]:
    advantages_G = np.asarray(function(rewards_G, eps=eps), np.float64)
    if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
        name = getattr(function, "__name__", repr(function))
        reason = f"for rewards {rewards_G.tolist()} it returned {advantages_G.tolist()}"
        fix = "return one finite advantage per reward, also for a single one"
        raise PluginError("advantage", name, reason, fix)
    return advantages_G.tolist()
