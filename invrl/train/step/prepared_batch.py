"""A batch before its first optimizer step: results computed from it, and the critic's
judgement of it.

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
    """A batch before its first optimizer step, by mini-batch: results computed without
    the critic."""

    shard: Shard
    packed: list[Packed]
    reference: Sequence[SampleNumbers | None]
    teacher: Sequence[SampleNumbers | None]
    old: Sequence[SampleNumbers | None]
    """Log-probs that the loss reads."""
    before: Sequence[SampleNumbers]
    """Log-probs that rewards and targets read; empty if not computed here."""
    started: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchWithAdvantages:
    """A batch with the critic's judgement."""

    shard: Shard
    """Samples with the advantages to train."""
    targets: Sequence[Targets | None]
    """Targets of the critic, by mini-batch; None without a critic."""
    metrics: Mapping[str, Metric]
