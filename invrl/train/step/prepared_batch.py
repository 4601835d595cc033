"""A batch before its first optimizer step: what the step computes of it, and how the
critic judges it.

Imported after `device.prepare()`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from invrl.train.batches.sharding import Shard
from invrl.train.critic.critic import Targets
from invrl.train.model.pipeline_schedule import Packed, SampleNumbers
from invrl.types.metrics import Metric


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A batch before its first optimizer step, by mini-batch: what is computed of it
    without the critic."""

    shard: Shard
    packed: list[Packed]
    reference: Sequence[SampleNumbers | None]
    teacher: Sequence[SampleNumbers | None]
    old: Sequence[SampleNumbers | None]
    """Log-probs that the loss reads."""
    before: Sequence[SampleNumbers]
    """Log-probs that rewards and targets read; empty where they are not computed
    here."""
    started: float
    """`time.monotonic()`"""
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """A batch as the critic sees it."""

    shard: Shard
    """With the advantages that are to be trained."""
    targets: Sequence[Targets | None]
    """What the critic learns, by mini-batch; None without a critic."""
    metrics: Mapping[str, Metric]
