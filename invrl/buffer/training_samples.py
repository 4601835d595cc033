"""Builds a TrainBatch from a taken batch and its tokens. Pure.

Each branch of a rollout becomes one row, the branches of its child sessions included. Invariant: a sampled
token is trained in exactly one row. A turn that several branches share is trained in the first of them and is
context in the others. A turn is not trained if its answer never reached the client or if it was aborted. At
the end of a branch such turns are cut off. Inside a branch they stay as context, because what follows was
conditioned on them.

Which reward counts for a token: the one of its turn; if there is none, its branch's (that of the deepest
rewarded turn of the branch); if there is none, its child session's; else the rollout's final one. With the
use "add", all of these count, and a turn also has the rewards of the turns that follow it. The advantage of a
reward is computed among rewards of its own kind (`comparison.py`)."""

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
    """Rows with their advantages, in the order of the groups. A reward's advantage is written to each trained
    token that it counts for. A rollout counts once in its group's baseline, however many rows it becomes.

    With `use` "replace", only the most particular reward of a token counts. With "add", a token's advantage
    is the sum of the advantages of its final, child's and branch's reward and of the turn rewards from its
    own turn to the end of its row. With `baseline` "group" and turn rewards only, that is the process
    supervision of GRPO (arXiv 2402.03300, section 4.1.3).

    Raises BufferStateError if the tokens of a taken rollout are missing; PluginError if the advantage
    function does not return one finite number per rollout."""
    by_session = {rollout.summary.session_id: rollout for rollout in rollouts}
    samples: list[TrainSample] = []
    advantages: list[NDArray[np.float32]] = []
    for group in taken.groups:
        advantage_of: dict[RewardOwner, float] = {}
        for comparison in comparisons(group, baseline):
            values = _group_advantages(comparison.rewards_R, advantage_fn, eps)
            advantage_of.update(zip(comparison.owners, values, strict=True))
        for summary in group.rollouts_G:
            rollout = by_session.get(summary.session_id)
            if rollout is None:
                place = f"session {summary.session_id} of group {group.id}"
                raise BufferStateError(f"batch {taken.batch_id}: no tokens for {place}")
            for branch in _branches(rollout):
                samples.append(branch.sample)
                advantages.append(_token_advantages(branch, summary, advantage_of, use))
    return TrainBatch(
        batch_id=taken.batch_id,
        version=taken.version,
        samples=tuple(samples),
        advantages=tuple(advantages),
        total_tokens=sum(int(sample.loss_mask_T.sum()) for sample in samples),
    )


def samples_from_rollout(rollout: Rollout) -> list[TrainSample]:
    """One row for each branch that has untrained tokens left; none for a rollout without tokens to train."""
    return [branch.sample for branch in _branches(rollout)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Branch:
    """A row, and all turns of its branch: those of the row first, then untrained ones that were cut off."""

    sample: TrainSample
    turns: tuple[Turn, ...]


def _branches(rollout: Rollout) -> list[_Branch]:
    """The branches that become rows. A branch is left out if another one continues it, or if each turn that
    it would train is trained in an earlier row."""
    whole_branches = [
        trajectory.turns
        for trajectory in rollout.trajectories
        if trajectory.turns[0].id not in rollout.summary.untrained_roots
    ]
    paths = [_without_untrained_end(turns) for turns in whole_branches]
    paths_ids = [tuple(turn.id for turn in path) for path in paths]
    branches: list[_Branch] = []
    trained_ids: set[str] = set()
    for turns, path, path_ids in zip(whole_branches, paths, paths_ids, strict=True):
        if any(_continues(other_ids, path_ids) for other_ids in paths_ids):
            continue
        new_ids = {turn.id for turn in path if _trainable(turn)} - trained_ids
        if not new_ids:
            continue
        sample = _row(rollout, path, new_ids, _branch_reward(rollout.summary, turns))
        if sample.loss_mask_T.any():
            branches.append(_Branch(sample=sample, turns=turns))
            trained_ids |= new_ids
    return branches


def _continues(longer_ids: tuple[str, ...], path_ids: tuple[str, ...]) -> bool:
    """Whether the one path begins with the other and has more turns."""
    return len(longer_ids) > len(path_ids) and longer_ids[: len(path_ids)] == path_ids


def _trainable(turn: Turn) -> bool:
    return turn.delivered and turn.trainable


def _without_untrained_end(turns: Sequence[Turn]) -> Sequence[Turn]:
    end = len(turns)
    while end and not _trainable(turns[end - 1]):
        end -= 1
    return turns[:end]


def _branch_reward(summary: RolloutSummary, turns: Sequence[Turn]) -> float:
    for turn in reversed(turns):
        if turn.id in summary.branch_rewards:
            return summary.branch_rewards[turn.id]
    return summary.child_rewards.get(turns[0].session_id, summary.reward)


def _reward_owners(summary: RolloutSummary, turns: Sequence[Turn]) -> list[RewardOwner]:
    """The owners of the rewards that count for all tokens of a branch: from that of the whole rollout to the
    most particular one. Rewards of single turns are not among them."""
    owners = [RewardOwner("final", summary.session_id)]
    session = child_owner(summary, turns[0].session_id)
    if session.kind == "child":
        owners.append(session)
    branch_turns = [turn.id for turn in turns if turn.id in summary.branch_rewards]
    if branch_turns:
        owners.append(RewardOwner("branch", branch_turns[-1]))
    return owners


def _token_advantages(
    branch: _Branch, summary: RolloutSummary, advantage_of: Mapping[RewardOwner, float], use: RewardUse
) -> NDArray[np.float32]:
    """The advantage of each token of a row, [T]; 0 for tokens that are not trained."""
    owners = _reward_owners(summary, branch.turns)
    if use == "add":
        turn_advantages = _summed_advantages(branch.turns, owners, advantage_of)
    else:
        turn_advantages = _most_particular_advantages(branch.turns, owners, advantage_of)
    parts = []
    for turn in branch.turns[: len(branch.sample.turn_ids)]:
        parts.append(np.zeros(len(turn.context_ids_T), np.float32))
        parts.append(np.full(len(turn.sampled_ids_T), turn_advantages[turn.id], np.float32))
    return np.where(branch.sample.loss_mask_T, np.concatenate(parts), np.float32(0.0))


def _most_particular_advantages(
    turns: Sequence[Turn], owners: Sequence[RewardOwner], advantage_of: Mapping[RewardOwner, float]
) -> dict[str, float]:
    """By turn id: the advantage of the turn's own reward, or else that of its branch."""
    branch_advantage = advantage_of[owners[-1]]
    return {turn.id: advantage_of.get(RewardOwner("turn", turn.id), branch_advantage) for turn in turns}


def _summed_advantages(
    turns: Sequence[Turn], owners: Sequence[RewardOwner], advantage_of: Mapping[RewardOwner, float]
) -> dict[str, float]:
    """By turn id: the sum of the advantages of the branch, of the turn and of the turns that follow it."""
    branch_advantage = sum(advantage_of[owner] for owner in owners)
    following = 0.0
    sums: dict[str, float] = {}
    for turn in reversed(turns):
        following += advantage_of.get(RewardOwner("turn", turn.id), 0.0)
        sums[turn.id] = branch_advantage + following
    return sums


def _row(rollout: Rollout, path: Sequence[Turn], trained_ids: set[str], reward: float) -> TrainSample:
    """One row of the turns in `path`; the sampled tokens of the turns in `trained_ids` are trained."""
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    grammars: list[GrammarSpan] = []
    start = 0
    for turn in path:
        num_context = len(turn.context_ids_T)
        num_sampled = len(turn.sampled_ids_T)
        is_trained = turn.id in trained_ids
        sampled_start = start + num_context
        end = sampled_start + num_sampled
        if is_trained and turn.grammar:
            grammars.append(GrammarSpan(start=sampled_start, end=end, grammar=turn.grammar))
        start = end
        tokens += [turn.context_ids_T, turn.sampled_ids_T]
        masks += [np.zeros(num_context, np.bool_), np.full(num_sampled, is_trained)]
        logprobs += [np.zeros(num_context, np.float32), turn.logprobs_T]
        versions += [np.full(num_context, -1, np.int32), turn.versions_T]
    mask_T = np.concatenate(masks)
    mask_T[:1] = False  # nothing comes before the first token, so it has no log-prob
    logprobs_T = np.where(mask_T, np.concatenate(logprobs), 0)
    versions_T = np.where(mask_T, np.concatenate(versions), -1)
    return TrainSample(
        tokens_T=np.concatenate(tokens).astype(np.int32, copy=False),
        loss_mask_T=mask_T,
        rollout_logprobs_T=logprobs_T.astype(np.float32, copy=False),
        versions_T=versions_T.astype(np.int32, copy=False),
        reward=reward,
        temperature=_temperature(rollout, path),
        group_id=rollout.summary.group_id,
        rollout_id=rollout.summary.session_id,
        attempt=rollout.summary.attempt,
        turn_ids=tuple(turn.id for turn in path),
        grammars=tuple(grammars),
    )


def _temperature(rollout: Rollout, path: Sequence[Turn]) -> float:
    """The one temperature of a row, which the run fixes: the trainer divides the row's logits by it."""
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
