"""Batches to measure a trainer with: random tokens in rows of chosen lengths. Pure
numpy."""

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

WORKLOADS = ("equal_lengths", "long_tailed", "shared_prompts")
_PROMPT_SHARE = 0.25
"""Tokens of a row that are not trained."""
_ROLLOUT_LOGPROB = -30.0
"""Of every trained token, in nats: far below the model's, so that every importance
weight is at its cap. With weights that the model decides, a few tokens would make the
whole gradient."""
_ROWS = 16
_GROUP = 8


def make_batch(
    workload: str, *, num_tokens: int, longest: int, vocab_size: int
) -> TrainBatch:
    """About `num_tokens` tokens in 16 rows, none longer than `longest`. "equal_lengths"
    and "long_tailed" share no prefixes; in "shared_prompts" groups of eight rows have
    one prompt, as long as half of a row."""
    rng = np.random.default_rng(0)
    mean = min(longest, num_tokens // _ROWS)
    lengths = [mean] * _ROWS
    if workload == "long_tailed":
        drawn = np.exp(1.2 * rng.standard_normal(_ROWS))
        scaled = drawn * num_tokens / drawn.sum()
        lengths = np.clip(scaled, 8, longest).astype(int).tolist()
    samples: list[TrainSample] = []
    prompt_T = np.empty(0, np.int32)
    for index, length in enumerate(lengths):
        tokens_T = rng.integers(0, vocab_size, length).astype(np.int32)
        num_prompt = max(1, int(_PROMPT_SHARE * length))
        if workload == "shared_prompts":
            num_prompt = length // 2
            if index % _GROUP == 0:
                prompt_T = tokens_T[:num_prompt]
            tokens_T[:num_prompt] = prompt_T
        samples.append(_sample(index, tokens_T, num_prompt))
    # One advantage for all, so that the gradient is not 0 whatever the tokens are.
    return TrainBatch(
        batch_id=0,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=tuple(sample.loss_mask_T.astype(np.float32) for sample in samples),
    )


def _sample(index: int, tokens_T: NDArray[np.int32], num_prompt: int) -> TrainSample:
    mask_T = np.arange(len(tokens_T)) >= num_prompt
    return TrainSample(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.where(mask_T, _ROLLOUT_LOGPROB, 0.0).astype(np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id=f"g{index // _GROUP}",
        rollout_id=f"r{index}",
        attempt=0,
        turn_ids=(f"t{index}",),
    )
