"""Samples with the prompt of one sample and the reply of another, from which KTO
estimates its reference point.

Pure NumPy. A reply begins at the first trained token.
"""

from dataclasses import replace

import numpy as np

from invrl.errors import TrainError
from invrl.types.batches import TrainBatch, TrainSample

MISMATCHED = "mismatched"
"""Number of a sample: 1 if it is mismatched, else 0."""


def with_mismatched_samples(batch: TrainBatch, *, max_tokens: int) -> TrainBatch:
    """Add a mismatched sample for each trained one: its prompt, with the reply of the
    next (the last one gets the first's).

    KTO's estimate (arXiv 2402.01306, section 4.1: y_j for x_i with j = i + 1 mod m),
    over the whole batch; TRL pairs within the samples that one process tokenizes
    together. A mismatched sample is in the group of its prompt, so that it comes into
    the same mini-batch; replies are cut where a sample would exceed `max_tokens` (0: no
    limit). A batch that trains nothing is returned unchanged. Raises TrainError for a
    single sample, which has no other reply."""
    trained = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    if not trained:
        return batch
    if len(trained) < 2:
        raise TrainError(
            f"batch {batch.batch_id} has {len(trained)} samples to train; kto compares each with another one"
        )
    samples: list[TrainSample] = []
    for sample in batch.samples:
        samples.append(replace(sample, numbers={**sample.numbers, MISMATCHED: 0.0}))
    advantages = list(batch.advantages)
    for sample, other in zip(trained, [*trained[1:], trained[0]], strict=True):
        mismatched = _mismatched(sample, other, max_tokens)
        samples.append(mismatched)
        advantages.append(np.zeros(len(mismatched.tokens_T), np.float32))
    return replace(
        batch, samples=tuple(samples), advantages=tuple(advantages), counts=None
    )


def _mismatched(
    sample: TrainSample, other: TrainSample, max_tokens: int
) -> TrainSample:
    """Return the prompt of `sample` with the reply of `other`, as the only sample of
    its rollout."""
    prompt_T = sample.tokens_T[: _reply_start(sample)]
    reply_start = _reply_start(other)
    tokens_T = np.concatenate([prompt_T, other.tokens_T[reply_start:]])
    mask_T = np.concatenate(
        [np.zeros(len(prompt_T), np.bool_), other.loss_mask_T[reply_start:]]
    )
    length = min(len(tokens_T), max_tokens or len(tokens_T))
    return replace(
        sample,
        tokens_T=tokens_T[:length],
        loss_mask_T=mask_T[:length],
        rollout_logprobs_T=np.zeros(length, np.float32),
        versions_T=np.where(mask_T[:length], sample.versions_T.max(), -1).astype(
            np.int32
        ),
        rollout_id=f"{sample.rollout_id}/{MISMATCHED}",
        turn_ids=(),
        grammars=(),
        experts_TLK=None,
        columns={name: np.zeros(length, np.float32) for name in sample.columns},
        numbers={**sample.numbers, MISMATCHED: 1.0},
    )


def _reply_start(sample: TrainSample) -> int:
    return int(sample.loss_mask_T.argmax())
