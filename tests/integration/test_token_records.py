"""What a step records of its tokens is the same in every layout of ranks, and is what
was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rank_pool import RankPool, Trainer
from slow_cases import first_quick, named_quick
from tiny_model import make_tiny_model
from train_reference import random_batch, rewarded_batch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import CriticConfig
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.step.token_records import batch_records
from invrl.types.batches import TrainBatch

LAYOUTS = {
    "one process": ParallelLayout(),
    "DP": ParallelLayout(data=2),
    "TP": ParallelLayout(tensor=2),
    "CP": ParallelLayout(context=2),
    "PP": ParallelLayout(pipeline=2),
    "TP and PP": ParallelLayout(tensor=2, pipeline=2),
}
BATCH = random_batch(4, groups=4)
Arrays = list[NDArray[np.float32]]


def settings(*, share_prefixes: bool = True, record: bool = True) -> TrainConfig:
    return TrainConfig(
        train_dtype="float32",
        lr=1e-2,
        max_tokens_per_micro_batch=41,
        share_prefixes=share_prefixes,
        record_trained_tokens=record,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", layers=2)


def logprobs_before(trainer: Trainer, batch: TrainBatch) -> Arrays:
    """Of each sample's trained tokens, in the order of the batch."""
    shards = shard_batch(batch, ranks=trainer.layout.data, steps=1)
    samples = [
        sample
        for shard in shards
        for mini_batch in shard
        for sample in mini_batch.samples
    ]
    found = dict(zip(map(id, samples), trainer.token_logprobs(batch), strict=True))
    return [found[id(sample)][sample.loss_mask_T] for sample in batch.samples]


def recorded(
    trainer: Trainer, batch: TrainBatch, *, steps: int
) -> tuple[Arrays, Arrays]:
    """Log-probs and advantages of each sample, as the trainer's handle puts them
    together."""
    results = trainer.train_records(batch, steps=steps)
    reporters = [trainer.layout.reporter(data) for data in range(trainer.layout.data)]
    for rank, result in enumerate(results):
        assert bool(result.token_records) == (rank in reporters)
    shards = shard_batch(batch, ranks=trainer.layout.data, steps=steps)
    records = batch_records(
        batch, shards, [results[rank].token_records for rank in reporters]
    )
    assert len(records) == len(batch.samples)
    logprobs: Arrays = []
    advantages: Arrays = []
    for sample, record in zip(batch.samples, records, strict=True):
        if record is None:  # its mini-batch trains nothing
            assert not sample.loss_mask_T.any()
            continue
        logprobs.append(record.logprobs_N)
        advantages.append(record.advantages_N)
    return logprobs, advantages


@pytest.mark.parametrize(
    "share_prefixes", first_quick([True, False]), ids=["shared prefixes", "whole rows"]
)
@pytest.mark.parametrize("steps", first_quick([3, 1]))
@pytest.mark.parametrize("layout", named_quick(LAYOUTS.keys(), "CP", "TP and PP"))
def test_step_records_the_logprobs_of_the_policy_before_it(
    layout: str, steps: int, share_prefixes: bool, pool: RankPool, model: Path
) -> None:
    """Also of the mini-batches that are trained after the first has changed the
    weights: their old log-probs were computed before."""
    algorithm = AlgorithmConfig(num_mini_batches=steps)
    train = settings(share_prefixes=share_prefixes)
    trainer = pool.build(
        model, layout=LAYOUTS[layout], train=train, algorithm=algorithm
    )
    before = logprobs_before(trainer, BATCH)
    logprobs, advantages = recorded(trainer, BATCH, steps=steps)
    masks = [sample.loss_mask_T for sample in BATCH.samples]
    assert len(logprobs) == len(before)
    for found_N, expected_N in zip(logprobs, before, strict=True):
        np.testing.assert_allclose(found_N, expected_N, rtol=1e-5, atol=1e-5)
    for found_N, advantages_T, mask_T in zip(
        advantages, BATCH.advantages, masks, strict=True
    ):
        np.testing.assert_array_equal(found_N, advantages_T[mask_T])
    after = logprobs_before(trainer, BATCH)
    assert (
        max(np.abs(a - b).max() for a, b in zip(after, before, strict=True) if len(a))
        > 1e-3
    )


@pytest.mark.parametrize("layout", first_quick(["PP", "DP", "one process"]))
def test_step_records_the_advantages_of_the_critic(
    layout: str, pool: RankPool, model: Path
) -> None:
    algorithm = AlgorithmConfig(advantage="gae", num_mini_batches=2)
    of_layout = recorded_by_critic(pool, model, algorithm, LAYOUTS[layout])
    alone = recorded_by_critic(pool, model, algorithm, ParallelLayout())
    for found, expected in zip(of_layout, alone, strict=True):
        for found_N, expected_N in zip(found, expected, strict=True):
            np.testing.assert_allclose(found_N, expected_N, rtol=1e-4, atol=1e-4)
    assert any(advantages_N.any() for advantages_N in alone[1])


def recorded_by_critic(
    pool: RankPool, model: Path, algorithm: AlgorithmConfig, layout: ParallelLayout
) -> tuple[Arrays, Arrays]:
    trainer = pool.build(model, layout=layout, train=settings(), algorithm=algorithm)
    return recorded(trainer, rewarded_batch(4), steps=2)


def test_no_token_record_is_written_if_turned_off(pool: RankPool, model: Path) -> None:
    trainer = pool.build(model, train=settings(record=False))
    [result] = trainer.train_records(BATCH)
    assert result.token_records == ()


def test_critic_warm_up_batch_has_no_trained_sample(
    pool: RankPool, model: Path
) -> None:
    algorithm = AlgorithmConfig(critic=CriticConfig(warmup_steps=1))
    trainer = pool.build(model, train=settings(), algorithm=algorithm)
    [result] = trainer.train_records(rewarded_batch(4))
    assert result.token_records
    assert set(result.token_records) == {None}
