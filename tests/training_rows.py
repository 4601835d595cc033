"""The training rows of a rollout, as the run builds them for a batch."""

from __future__ import annotations

from running_gateway import Running

from invrl.algorithms.advantages import dr_grpo, grpo
from invrl.buffer.training_samples import build_batch
from invrl.types import (
    Group,
    Rollout,
    RolloutSummary,
    TakenBatch,
    TrainSample,
    WeightVersion,
)


def training_rows(rollout: Rollout) -> list[TrainSample]:
    """One row for each branch that has untrained tokens left."""
    summary = rollout.summary
    group = Group(id=summary.group_id, task_id=summary.task_id, rollouts_G=(summary,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    batch = build_batch(taken, [rollout], dr_grpo, 1e-4)
    return list(batch.samples)


def rows_of_pair(gateway: Running, summary: RolloutSummary) -> list[TrainSample]:
    """The rows of a group that has this recorded rollout twice."""
    group = Group(id="g", task_id="t", rollouts_G=(summary,))
    taken = TakenBatch(batch_id=1, version=WeightVersion(0), groups=(group,))
    batch = build_batch(taken, gateway.store.taken_rollouts(taken), grpo, 1e-4)
    return list(batch.samples)
