"""Rows that share prefixes, and what each of their packed tokens may see."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch, TokenSequence
from invrl.train.parallel.context_share import ContextShare
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

LAYOUTS = {"one mask per tree": 10_000, "one block per branch": 0, "both": 8}
"""Up to how many tokens a tree is under one mask."""


@st.composite
def rows(draw: st.DrawFn) -> list[TokenSequence]:
    drawn: list[TokenSequence] = []
    for _ in range(draw(st.integers(0, 7))):
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        wanted = (
            draw(st.sets(st.integers(1, len(tokens) - 1))) if len(tokens) > 1 else set()
        )
        drawn.append(
            TokenSequence(
                tokens_T=np.array(tokens, np.int32),
                wanted_N=np.array(sorted(wanted), np.int64),
                temperature=draw(st.sampled_from([0.5, 1.0])),
            )
        )
    return drawn


def visible(micro_batch: MicroBatch) -> list[np.ndarray]:
    """Places that each packed token attends to, ascending by position."""
    seen: list[np.ndarray] = []
    for block in micro_batch.blocks:
        assert block.start == len(seen), "blocks tile the row"
        keys_K = np.concatenate([block.prefix_K, np.arange(block.start, block.end)])
        count = block.end - block.start
        mask_QK = block.mask_QK
        if mask_QK is None:
            mask_QK = np.tri(count, len(keys_K), len(block.prefix_K), dtype=bool)
        assert mask_QK.shape == (count, len(keys_K))
        seen += [keys_K[mask_Q] for mask_Q in mask_QK]
    assert len(seen) == len(micro_batch.tokens_P) == len(micro_batch.positions_P)
    return [places[np.argsort(micro_batch.positions_P[places])] for places in seen]


def sample(group: int, rollout: int, length: int, trained: int) -> TrainSample:
    mask_T = np.zeros(length, np.bool_)
    mask_T[length - trained :] = True
    tokens_T = np.full(length, group, np.int32)
    tokens_T[length - trained :] = rollout + 1000
    return TrainSample(
        tokens_T=tokens_T,
        loss_mask_T=mask_T,
        rollout_logprobs_T=np.zeros(length, np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        reward=0.0,
        temperature=1.0,
        group_id=f"g{group}",
        rollout_id=f"g{group}r{rollout}",
        attempt=0,
        turn_ids=("t",),
    )


def batch_of(samples: list[TrainSample]) -> TrainBatch:
    return TrainBatch(
        batch_id=7,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=tuple(s.loss_mask_T.astype(np.float32) for s in samples),
    )


def shares_of(
    micro_batch: MicroBatch, ranks: int, multiple: int = 1
) -> list[ContextShare]:
    """The part of a micro-batch that each context-parallel rank computes."""
    return [
        ContextShare.of(micro_batch, rank=rank, ranks=ranks, multiple=multiple)
        for rank in range(ranks)
    ]


def sights(blocks: list[AttentionBlock]) -> list[set[int]]:
    """Places that each query sees, in the order of the blocks' queries."""
    seen: list[set[int]] = []
    for block in blocks:
        keys_K = np.concatenate([block.prefix_K, np.arange(block.start, block.end)])
        count = block.end - block.start
        mask_QK = block.mask_QK
        if mask_QK is None:
            mask_QK = np.tri(count, len(keys_K), len(block.prefix_K), dtype=bool)
        assert mask_QK.shape == (count, len(keys_K))
        seen += [set(keys_K[mask_K].tolist()) for mask_K in mask_QK]
    return seen
