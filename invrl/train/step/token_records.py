"""Records of trained tokens and their training data, in the order of the batch's
samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from invrl.interfaces import TokenRecord
from invrl.train.batches.sharding import Shard, by_sample
from invrl.types.batches import TrainBatch

if TYPE_CHECKING:
    import torch

    from invrl.train.model.pipeline_schedule import Packed, SampleNumbers


def mini_batch_records(
    mini_batch: TrainBatch,
    packed: "Packed",
    old: "SampleNumbers | None",
    current: "Sequence[torch.Tensor]",
) -> list[TokenRecord]:
    """Return one record for each sample of a mini-batch whose gradient was computed.
    `current` has the policy's log-probs [N] of each micro-batch; it is empty if nothing
    is recorded, and on a pipeline stage without log-probs: then there are no records at
    all."""
    if not current:
        return []
    logprobs = old
    if logprobs is None:
        logprobs = [
            np.zeros(len(sequence.tokens_T), np.float32)
            for sequence in packed.sequences
        ]
        for micro_batch, current_N in zip(packed.micro_batches, current, strict=True):
            micro_batch.place(current_N.float().cpu().numpy(), logprobs)
    records: list[TokenRecord] = []
    for sample, advantages_T, logprobs_T in zip(
        mini_batch.samples, mini_batch.advantages, logprobs, strict=True
    ):
        is_trained_T = sample.loss_mask_T
        records.append(
            TokenRecord(
                advantages_N=advantages_T[is_trained_T],
                logprobs_N=logprobs_T[is_trained_T],
            )
        )
    return records


def batch_records(
    batch: TrainBatch,
    shards: Sequence[Shard],
    records: Sequence[Sequence[TokenRecord | None]],
) -> tuple[TokenRecord | None, ...]:
    """Return the records in the order of the batch's samples. `records` are those of
    each replica, in the order of its shard, or none at all."""
    if not any(records):
        return ()
    record_of = by_sample(shards, records)
    return tuple(record_of.get(id(sample)) for sample in batch.samples)
