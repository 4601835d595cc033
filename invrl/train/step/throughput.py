"""Amount of work of a rank in a training step, as metrics.

Imported after `device.prepare()`.
"""

from collections.abc import Sequence

from invrl.train.batches.sharding import Shard
from invrl.train.model.pipeline_schedule import Packed, concatenate_micro_batches
from invrl.types.metrics import Max, Metric, Sum


def work_amounts(
    shard: Shard, packed: Sequence[Packed], seconds: float
) -> dict[str, Metric]:
    """Return this rank's amounts of work. Merging the ranks' metrics adds these up."""
    trained_tokens = 0
    sample_tokens = 0
    for mini_batch in shard:
        for sample in mini_batch.samples:
            trained_tokens += int(sample.loss_mask_T.sum())
            sample_tokens += len(sample.tokens_T)
    micro_batches = concatenate_micro_batches(packed)
    return {
        "tokens": Sum(trained_tokens),
        "computed_tokens": Sum(
            sum(len(micro_batch.tokens_P) for micro_batch in micro_batches)
        ),
        "row_tokens": Sum(sample_tokens),
        "projected_tokens": Sum(
            sum(len(micro_batch.project_U) for micro_batch in micro_batches)
        ),
        "micro_batches": Sum(len(micro_batches)),
        "largest_micro_batch": Max(
            max((len(micro_batch.tokens_P) for micro_batch in micro_batches), default=0)
        ),
        "tokens_per_s": Sum(sample_tokens / seconds if seconds else 0.0),
    }
