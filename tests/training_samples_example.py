"""Training rows: those that the run builds of a rollout for its batch, and those that a
test writes turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from invrl.algorithms.advantages.advantages import dr_grpo, grpo
from invrl.buffer.samples.training_samples import build_batch
from invrl.types.batches import TakenBatch, TrainSample
from invrl.types.groups import Group
from invrl.types.rollouts import Rollout, RolloutSummary
from invrl.types.weights import WeightVersion

if TYPE_CHECKING:
    from running_gateway import Running


def training_rows(rollout: Rollout) -> list[TrainSample]:
    """One row for each branch that has untrained tokens left."""
    taken = batch_of_one(rollout.summary)
    batch = build_batch(taken, [rollout], dr_grpo, 1e-4)
    return list(batch.samples)


def batch_of_one(summary: RolloutSummary) -> TakenBatch:
    group = Group(
        id=summary.group_id,
        task_id=summary.task_id,
        rollouts_G=(summary,),
    )
    return TakenBatch(
        batch_id=0,
        version=WeightVersion(0),
        groups=(group,),
    )


def rows_of_pair(gateway: Running, summary: RolloutSummary) -> list[TrainSample]:
    """The rows of a group that has this recorded rollout twice."""
    taken = batch_of_one(summary)
    rollouts = gateway.store.taken_rollouts(taken)
    batch = build_batch(taken, rollouts, grpo, 1e-4)
    return list(batch.samples)


def row_of_turns(*turns: tuple[str, int, int, bool]) -> TrainSample:
    """A row of turns, each (id, tokens of context, sampled tokens, whether they are
    trained)."""
    mask: list[bool] = []
    spans: list[tuple[int, int]] = []
    for _, num_context, num_sampled, is_trained in turns:
        start = len(mask) + num_context
        end = start + num_sampled
        spans.append((start, end))
        mask += [False] * num_context
        mask += [is_trained] * num_sampled
    mask[0] = False  # nothing predicts the first token
    mask_T = np.array(mask)
    return TrainSample(
        tokens_T=np.arange(len(mask), dtype=np.int32),
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, -0.5, 0).astype(np.float32),
        versions_T=np.where(mask_T, 1, -1).astype(np.int32),
        reward=1.0,
        temperature=1.0,
        group_id="group",
        rollout_id=turns[0][0],
        attempt=0,
        turn_ids=tuple(turn[0] for turn in turns),
        turn_spans=tuple(spans),
    )
