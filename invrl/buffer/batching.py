"""From a taken batch and its tokens to a TrainBatch. Pure; called by the loop's process.

One row per branch of a rollout. Invariant: a sampled token is trained in exactly one row. A turn that
several branches share is trained in the first of them and is context in the others. What is not trained:
a turn whose answer never reached the client, or that was aborted. At the end of a branch such turns are
cut off; inside it they stay as context, because what follows was conditioned on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.errors import BufferStateError, PluginError
from invrl.interfaces import AdvantageFn
from invrl.types import Group, Rollout, TakenBatch, TrainBatch, TrainSample, Turn


def build_batch(
    taken: TakenBatch, rollouts: Iterable[Rollout], advantage_fn: AdvantageFn, eps: float
) -> TrainBatch:
    """Rows with their advantages, in the order of the groups: a rollout's advantage stands on each of its
    trained tokens, and the rollout counts once in its group's baseline however many rows it became.

    Raises BufferStateError if the tokens of a taken rollout are missing, PluginError if the advantage
    function returns anything but one finite number per rollout.
    """
    by_session = {rollout.summary.session_id: rollout for rollout in rollouts}
    samples: list[TrainSample] = []
    advantages: list[NDArray[np.float32]] = []
    for group in taken.groups:
        advantages_G = _group_advantages(group, advantage_fn, eps)
        for summary, advantage in zip(group.rollouts_G, advantages_G, strict=True):
            rollout = by_session.get(summary.session_id)
            if rollout is None:
                place = f"session {summary.session_id} of group {group.id}"
                raise BufferStateError(f"batch {taken.batch_id}: no tokens for {place}")
            for sample in samples_from_rollout(rollout):
                samples.append(sample)
                advantages.append(np.where(sample.loss_mask_T, advantage, 0.0).astype(np.float32))
    return TrainBatch(
        batch_id=taken.batch_id,
        version=taken.version,
        samples=tuple(samples),
        advantages=tuple(advantages),
        total_tokens=sum(int(sample.loss_mask_T.sum()) for sample in samples),
        total_rollouts=len({sample.rollout_id for sample in samples}),
        total_samples=len(samples),
    )


def samples_from_rollout(rollout: Rollout) -> list[TrainSample]:
    """One row per branch that has something left to train; none for a rollout without trained tokens."""
    paths = [_without_untrained_end(trajectory.turns) for trajectory in rollout.trajectories]
    ids = [tuple(turn.id for turn in path) for path in paths]
    samples: list[TrainSample] = []
    trained: set[str] = set()
    for k, path in enumerate(paths):
        longer = any(len(other) > len(ids[k]) and other[: len(ids[k])] == ids[k] for other in ids)
        fresh = {turn.id for turn in path if _trainable(turn)} - trained
        if longer or not fresh:
            continue
        sample = _row(rollout, path, fresh)
        if sample.loss_mask_T.any():
            samples.append(sample)
            trained |= fresh
    return samples


def _trainable(turn: Turn) -> bool:
    return turn.delivered and turn.trainable


def _without_untrained_end(turns: Sequence[Turn]) -> Sequence[Turn]:
    end = len(turns)
    while end and not _trainable(turns[end - 1]):
        end -= 1
    return turns[:end]


def _row(rollout: Rollout, path: Sequence[Turn], fresh: set[str]) -> TrainSample:
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    logprobs: list[NDArray[np.float32]] = []
    versions: list[NDArray[np.int32]] = []
    for turn in path:
        context, sampled = len(turn.context_ids_T), len(turn.sampled_ids_T)
        trains = turn.id in fresh
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
        reward=rollout.summary.reward,
        temperature=_temperature(rollout, path),
        group_id=rollout.summary.group_id,
        rollout_id=rollout.summary.session_id,
        attempt=rollout.summary.attempt,
        turn_ids=tuple(turn.id for turn in path),
    )


def _temperature(rollout: Rollout, path: Sequence[Turn]) -> float:
    """The trainer divides a row's logits by one number, which the run pins."""
    temperatures = {turn.temperature for turn in path}
    if len(temperatures) != 1:
        session = rollout.summary.session_id
        raise BufferStateError(f"session {session} was sampled at several temperatures: {temperatures}")
    return temperatures.pop()


def _group_advantages(group: Group, advantage_fn: AdvantageFn, eps: float) -> Sequence[float]:
    rewards_G = np.array([rollout.reward for rollout in group.rollouts_G], np.float64)
    advantages_G = np.asarray(advantage_fn(rewards_G, eps=eps), np.float64)
    if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
        name = getattr(advantage_fn, "__name__", repr(advantage_fn))
        reason = f"for rewards {rewards_G.tolist()} it returned {advantages_G.tolist()}"
        fix = "return one finite advantage per rollout of the group"
        raise PluginError("advantage", name, reason, fix)
    return advantages_G.tolist()
