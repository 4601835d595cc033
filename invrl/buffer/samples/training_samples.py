"""Builds a TrainBatch from a taken batch and its tokens. Pure.

Each trajectory of a rollout becomes one sample, including those of its child sessions.
Invariant: a sampled token is trained in exactly one sample. A turn that several
trajectories share is trained in the first of them and is context in the others. A turn
is not trained if its reply never reached the client or if it was aborted. At the end of
a trajectory such turns are cut off. Inside a trajectory they stay as context, because
later turns were conditioned on them.

The reward of a token is that of its turn; if there is none, its trajectory's (that of
the deepest rewarded turn of the trajectory); if there is none, its child session's;
else the rollout's final one. With the use "add", all of these count, and a turn also
has the rewards of the turns that follow it. The advantage of a reward is computed among
rewards of its own kind (`comparison.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages.advantage_rules import PLAIN_RULES, AdvantageRules
from invrl.algorithms.advantages.whitening import whiten_samples
from invrl.buffer.config import RewardBaseline, RewardUse
from invrl.buffer.samples.comparison import RewardOwner
from invrl.buffer.samples.sample_advantages import batch_advantages, token_advantages
from invrl.buffer.samples.shaped_groups import ShapedGroup, shape_group
from invrl.buffer.samples.token_rewards import token_rewards
from invrl.errors import BufferStateError, ConfigError, RunStoreError
from invrl.interfaces import AdvantageFn
from invrl.types.batches import (
    SOLVED_NUMBER,
    GrammarSpan,
    TakenBatch,
    TrainBatch,
    TrainSample,
)
from invrl.types.extra_columns import ExtraColumn
from invrl.types.rollouts import Rollout, RolloutSummary
from invrl.types.routed_experts import RoutedExperts, unknown_expert
from invrl.types.token_ages import TokenAges
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion

REWARDS_COLUMN = "rewards"
"""Column of a sample's token rewards, where the trainer computes the advantages."""
SHAPING_NUMBER = "reward_shaping"
"""Number of a sample that was added to its rollout's final reward, where rewards are
shaped."""


def build_batch(
    taken: TakenBatch,
    rollouts: Iterable[Rollout],
    advantage_fn: AdvantageFn,
    eps: float,
    *,
    baseline: RewardBaseline = "depth",
    use: RewardUse = "replace",
    extra_columns: Iterable[ExtraColumn] = (),
    rules: AdvantageRules = PLAIN_RULES,
    max_staleness: int = 0,
    masks_stale: bool = False,
) -> TrainBatch:
    """Build samples with their advantages, in the order of the groups. A reward's
    advantage is written to each trained token that it counts for. A rollout counts once
    in its group's baseline, however many samples it becomes.

    With `use` "replace", only the most specific reward of a token counts. With "add", a
    token's advantage is the sum of the advantages of its final, child's and
    trajectory's reward and of the turn rewards from its own turn to the end of its
    sample, each times the discount for every turn in between. With `baseline`
    "group", turn rewards only and no discount, this is the process supervision of GRPO
    (arXiv 2402.03300, section 4.1.3).

    The `rules` shape final rewards and leave rollouts out before rewards are compared
    (`shaped_groups.py`), and whiten the advantages afterwards. Where the trainer
    computes the advantages they are 0 here, and samples have the column "rewards"
    instead (`token_rewards.py`).

    With `masks_stale`, tokens more than `max_staleness` versions older than the batch's
    version are context; a sample without any other is left out.

    Every sample has each of the `extra_columns`, even if its rollout was given no
    numbers: those of tokens and turns as a column, those of rollouts as a number.

    Raises RunStoreError if the tokens of a trained rollout are missing; PluginError if
    the advantage function does not return one finite number per rollout; ConfigError
    for a reward column that samples do not have.
    """
    groups = [shape_group(group, rules) for group in taken.groups]
    advantage_of: dict[RewardOwner, float] = {}
    if not rules.algorithm.token_level:
        compared = [group.compared for group in groups]
        advantage_of = batch_advantages(compared, baseline, advantage_fn, eps, rules)
    oldest = WeightVersion(taken.version - max_staleness) if masks_stale else None
    built = _batch_samples(taken, groups, rollouts, tuple(extra_columns), oldest)
    samples: list[TrainSample] = []
    advantages: list[NDArray[np.float64]] = []
    for group, trajectory_sample in built:
        if trajectory_sample.sample.loss_mask_T.any():
            sample, advantages_T = _with_advantages(
                trajectory_sample, group, advantage_of, use, rules
            )
            samples.append(sample)
            advantages.append(advantages_T)
    whitened = whiten_samples(
        advantages,
        [sample.loss_mask_T for sample in samples],
        [sample.rollout_id for sample in samples],
        over=rules.algorithm.whitened_over,
        std_floor=rules.algorithm.advantage_std.floor,
    )
    return TrainBatch(
        batch_id=taken.batch_id,
        version=taken.version,
        samples=tuple(samples),
        advantages=tuple(advantages_T.astype(np.float32) for advantages_T in whitened),
        ages=_token_ages(taken, [sample for _, sample in built], max_staleness),
    )


def _batch_samples(
    taken: TakenBatch,
    groups: Iterable[ShapedGroup],
    rollouts: Iterable[Rollout],
    extra_columns: Sequence[ExtraColumn],
    oldest: WeightVersion | None,
) -> list[tuple[ShapedGroup, "_TrajectorySample"]]:
    """Return the samples of all trained rollouts, with their groups. Raises
    RunStoreError."""
    rollouts_by_session = {rollout.summary.session_id: rollout for rollout in rollouts}
    samples: list[tuple[ShapedGroup, _TrajectorySample]] = []
    for group in groups:
        for summary in group.trained():
            rollout = rollouts_by_session.get(summary.session_id)
            if rollout is None:
                place = f"session {summary.session_id} of group {summary.group_id}"
                raise RunStoreError(f"batch {taken.batch_id}: no tokens for {place}")
            for sample in _trajectory_samples(rollout, extra_columns, oldest):
                samples.append((group, replace(sample, summary=summary)))
    return samples


def _with_advantages(
    trajectory_sample: "_TrajectorySample",
    group: ShapedGroup,
    advantage_of: Mapping[RewardOwner, float],
    use: RewardUse,
    rules: AdvantageRules,
) -> tuple[TrainSample, NDArray[np.float64]]:
    """Return a sample with its numbers and columns of rewards, and the advantages of
    its tokens before they are whitened."""
    summary = trajectory_sample.summary
    turns = trajectory_sample.trajectory.turns
    sample = _with_reward_numbers(trajectory_sample.sample, summary, group, rules)
    if rules.algorithm.token_level:
        sample = _with_token_rewards(sample, summary, turns, use, rules)
        return sample, np.zeros(len(sample.tokens_T))
    advantages_T = token_advantages(
        summary,
        turns,
        sample.loss_mask_T,
        advantage_of,
        use=use,
        discount=rules.algorithm.discount,
    )
    return sample, advantages_T


def _token_ages(
    taken: TakenBatch, samples: Iterable["_TrajectorySample"], bound: int
) -> TokenAges:
    """Count the tokens by age, and what is masked because of it."""
    ages = [np.empty(0, np.int32)]
    num_masked_tokens = 0
    num_masked_samples = 0
    for sample in samples:
        ages.append(taken.version - sample.versions_T)
        num_masked_tokens += sample.num_masked
        num_masked_samples += not sample.sample.loss_mask_T.any()
    distinct, counts = np.unique(np.concatenate(ages), return_counts=True)
    return TokenAges(
        bound=bound,
        tokens=dict(zip(distinct.tolist(), counts.tolist(), strict=True)),
        masked_tokens=num_masked_tokens,
        masked_samples=num_masked_samples,
    )


def _with_reward_numbers(
    sample: TrainSample,
    summary: RolloutSummary,
    group: ShapedGroup,
    rules: AdvantageRules,
) -> TrainSample:
    """Add the numbers `SHAPING_NUMBER` and `SOLVED_NUMBER`, if the rules have them."""
    numbers = dict(sample.numbers)
    if summary.session_id in group.shaping:
        numbers[SHAPING_NUMBER] = group.shaping[summary.session_id]
    if rules.solved_reward is not None:
        numbers[SOLVED_NUMBER] = float(summary.reward >= rules.solved_reward)
    return replace(sample, numbers=numbers)


def _with_token_rewards(
    sample: TrainSample,
    summary: RolloutSummary,
    trajectory_turns: Sequence[Turn],
    use: RewardUse,
    rules: AdvantageRules,
) -> TrainSample:
    columns: list[NDArray[np.float32]] = []
    for name in rules.algorithm.reward_columns:
        if name not in sample.columns:
            reason = (
                f"samples have no column of this name, only {sorted(sample.columns)}"
            )
            raise ConfigError(
                "algorithm.reward_columns", name, reason, "declare it, or leave it out"
            )
        columns.append(sample.columns[name])
    rewards_T = token_rewards(
        summary, trajectory_turns, sample.loss_mask_T, use=use, columns=columns
    )
    return replace(sample, columns={**sample.columns, REWARDS_COLUMN: rewards_T})


# ---------------------------------------------------------- trajectories and samples


def rollout_samples(rollout: Rollout) -> list[TrainSample]:
    """Return the samples of a rollout, without extra columns, whether or not it was
    trained."""
    return [
        trajectory_sample.sample
        for trajectory_sample in _trajectory_samples(rollout, (), None)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TrainedTrajectory:
    turns: tuple[Turn, ...]
    """All its turns, from the root to the leaf."""
    sample_turns: tuple[Turn, ...]
    """Turns of its sample: all up to the last one that may be trained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TrajectorySample:
    summary: RolloutSummary
    """Reward of its rollout; the shaped one where the samples are of a batch."""
    trajectory: _TrainedTrajectory
    sample: TrainSample
    versions_T: NDArray[np.int32]
    """Versions of its tokens that are trained or masked, without the others."""
    num_masked: int
    """Tokens that are older than the oldest version to train."""


def _trajectory_samples(
    rollout: Rollout, extra_columns: Sequence[ExtraColumn], oldest: WeightVersion | None
) -> list[_TrajectorySample]:
    """Return the samples of a rollout. A trajectory becomes no sample if another
    trajectory continues it, or if all its turns are trained in earlier samples. Tokens
    of versions before `oldest` are masked, which may leave a sample nothing to
    train."""
    trajectories = _trajectories(rollout)
    continued_ids: set[str] = set()
    for trajectory in trajectories:
        continued_ids.update(turn.id for turn in trajectory.sample_turns[:-1])
    trajectory_samples: list[_TrajectorySample] = []
    trained_ids: set[str] = set()
    for trajectory in trajectories:
        last_turn = trajectory.sample_turns[-1]
        if last_turn.id in continued_ids:
            continue
        trainable_ids = {
            turn.id for turn in trajectory.sample_turns if _may_be_trained(turn)
        }
        new_ids = trainable_ids - trained_ids
        if not new_ids:
            continue
        versions_T = np.concatenate(
            [turn.versions_T for turn in trajectory.sample_turns if turn.id in new_ids]
        )
        num_masked = 0 if oldest is None else int((versions_T < oldest).sum())
        sample = _training_sample(rollout, trajectory, new_ids, extra_columns, oldest)
        if num_masked or sample.loss_mask_T.any():
            trajectory_sample = _TrajectorySample(
                summary=rollout.summary,
                trajectory=trajectory,
                sample=sample,
                versions_T=versions_T,
                num_masked=num_masked,
            )
            trajectory_samples.append(trajectory_sample)
            trained_ids |= new_ids
    return trajectory_samples


def _trajectories(rollout: Rollout) -> list[_TrainedTrajectory]:
    """Return the trajectories that have a turn to train, without those of untrained
    roots."""
    trajectories: list[_TrainedTrajectory] = []
    for trajectory in rollout.trajectories:
        turns = trajectory.turns
        if turns[0].id in rollout.summary.untrained_roots:
            continue
        num_turns = len(turns)
        while num_turns > 0 and not _may_be_trained(turns[num_turns - 1]):
            num_turns -= 1
        if num_turns > 0:
            trajectories.append(
                _TrainedTrajectory(turns=turns, sample_turns=turns[:num_turns])
            )
    return trajectories


def _may_be_trained(turn: Turn) -> bool:
    return turn.delivered and turn.trainable


def _training_sample(
    rollout: Rollout,
    trajectory: _TrainedTrajectory,
    trained_ids: set[str],
    extra_columns: Sequence[ExtraColumn],
    oldest: WeightVersion | None,
) -> TrainSample:
    """Build the sample of a trajectory. The sampled tokens of the turns in
    `trained_ids` are trained, from the version `oldest` on; all other tokens are
    context, with log-prob 0 and version -1."""
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    grammars: list[GrammarSpan] = []
    turn_spans: list[tuple[int, int]] = []
    turn_end = 0
    for turn in trajectory.sample_turns:
        num_context = len(turn.context_ids_T)
        num_sampled = len(turn.sampled_ids_T)
        sampled_start = turn_end + num_context
        turn_end = sampled_start + num_sampled
        turn_spans.append((sampled_start, turn_end))
        is_trained = turn.id in trained_ids
        if is_trained and turn.grammar:
            span = GrammarSpan(start=sampled_start, end=turn_end, grammar=turn.grammar)
            grammars.append(span)
        tokens.append(turn.context_ids_T)
        tokens.append(turn.sampled_ids_T)
        masks.append(np.zeros(num_context, np.bool_))
        masks.append(np.full(num_sampled, is_trained))
        logprobs.append(np.zeros(num_context, np.float32))
        logprobs.append(turn.logprobs_T)
        versions.append(np.full(num_context, -1, np.int32))
        versions.append(turn.versions_T)
    mask_T = np.concatenate(masks)
    if oldest is not None:
        mask_T &= np.concatenate(versions) >= oldest
    mask_T[:1] = False  # nothing comes before the first token, so it has no log-prob
    logprobs_T = np.where(mask_T, np.concatenate(logprobs), 0)
    versions_T = np.where(mask_T, np.concatenate(versions), -1)
    summary = rollout.summary
    return TrainSample(
        tokens_T=np.concatenate(tokens).astype(np.int32, copy=False),
        loss_mask_T=mask_T,
        rollout_logprobs_T=logprobs_T.astype(np.float32, copy=False),
        versions_T=versions_T.astype(np.int32, copy=False),
        reward=_trajectory_reward(summary, trajectory.turns),
        temperature=_temperature(summary.session_id, trajectory.sample_turns),
        group_id=summary.group_id,
        rollout_id=summary.session_id,
        attempt=summary.attempt,
        turn_ids=tuple(turn.id for turn in trajectory.sample_turns),
        turn_spans=tuple(turn_spans),
        grammars=tuple(grammars),
        experts_TLK=_experts(rollout, trajectory.sample_turns),
        top_logprobs=_top_logprobs(rollout, trajectory.sample_turns, mask_T),
        columns=_extra_columns(rollout, trajectory.sample_turns, mask_T, extra_columns),
        numbers=_extra_numbers(summary, extra_columns),
    )


def _extra_columns(
    rollout: Rollout,
    turns: Sequence[Turn],
    mask_T: NDArray[np.bool_],
    extra_columns: Sequence[ExtraColumn],
) -> dict[str, NDArray[np.float32]]:
    """Return the columns of tokens and turns by name, float32 [T]: 0 at untrained
    tokens; the default at trained tokens without a number."""
    columns: dict[str, NDArray[np.float32]] = {}
    for column in extra_columns:
        if column.level == "rollout":
            continue
        parts: list[NDArray[np.float32]] = []
        for turn in turns:
            parts.append(np.zeros(len(turn.context_ids_T), np.float32))
            parts.append(_turn_numbers(rollout, turn, column))
        columns[column.name] = np.where(mask_T, np.concatenate(parts), np.float32(0.0))
    return columns


def _turn_numbers(
    rollout: Rollout, turn: Turn, column: ExtraColumn
) -> NDArray[np.float32]:
    """Return one number for each sampled token of the turn."""
    if column.level == "token":
        given_T = rollout.token_numbers.get(turn.id, {}).get(column.name)
        if given_T is not None:
            return given_T
        number = column.default
    else:
        number = rollout.summary.turn_numbers.get(turn.id, {}).get(
            column.name, column.default
        )
    return np.full(len(turn.sampled_ids_T), number, np.float32)


def _extra_numbers(
    summary: RolloutSummary, extra_columns: Sequence[ExtraColumn]
) -> dict[str, float]:
    """Return the numbers of the rollout, or their defaults, by name."""
    return {
        column.name: summary.numbers.get(column.name, column.default)
        for column in extra_columns
        if column.level == "rollout"
    }


def _experts(rollout: Rollout, turns: Sequence[Turn]) -> RoutedExperts | None:
    """Return the experts that computed each token of a sample: those of the pass that
    predicted the next token. Unknown for turns without a record, and for the last
    token."""
    recorded = [
        rollout.routed_experts[turn.id]
        for turn in turns
        if turn.id in rollout.routed_experts
    ]
    if not recorded:
        return None
    _, *sizes = recorded[0].shape
    dtype = recorded[0].dtype
    predicting: list[RoutedExperts] = []
    for turn in turns:
        num_tokens = len(turn.context_ids_T) + len(turn.sampled_ids_T)
        experts_TLK = rollout.routed_experts.get(turn.id)
        if experts_TLK is None:
            experts_TLK = np.full((num_tokens, *sizes), unknown_expert(dtype), dtype)
        predicting.append(experts_TLK)
    predicting.append(np.full((1, *sizes), unknown_expert(dtype), dtype))
    return np.concatenate(predicting)[1:]


def _top_logprobs(
    rollout: Rollout, turns: Sequence[Turn], mask_T: NDArray[np.bool_]
) -> TopLogprobs | None:
    """Return the likeliest tokens at each trained token of a sample. None in turns
    without a record."""
    if not any(turn.id in rollout.top_logprobs for turn in turns):
        return None
    parts: list[TopLogprobs] = []
    for turn in turns:
        parts.append(TopLogprobs.none(len(turn.context_ids_T), 0))
        parts.append(
            rollout.top_logprobs.get(
                turn.id, TopLogprobs.none(len(turn.sampled_ids_T), 0)
            )
        )
    return TopLogprobs.joined(parts).where(mask_T)


def _trajectory_reward(summary: RolloutSummary, turns: Sequence[Turn]) -> float:
    """Return the reward of the deepest rewarded turn; else that of the child session;
    else the rollout's."""
    for turn in reversed(turns):
        if turn.id in summary.branch_rewards:
            return summary.branch_rewards[turn.id]
    session_id = turns[0].session_id
    return summary.child_rewards.get(session_id, summary.reward)


def _temperature(session_id: str, turns: Sequence[Turn]) -> float:
    """Return the one temperature of a sample, which the run fixes: the trainer divides
    the sample's logits by it."""
    temperatures = {turn.temperature for turn in turns}
    if len(temperatures) != 1:
        raise BufferStateError(
            f"session {session_id} was sampled at several temperatures: {temperatures}"
        )
    return temperatures.pop()
