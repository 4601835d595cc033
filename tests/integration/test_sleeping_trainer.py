"""A rank that gives memory back between its steps: it learns the same, bit for bit, and
can be asked and saved while it sleeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_pool import Arrays, RankPool, Trainer
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import check_same_bits, random_batch, rewarded_batch

from invrl.algorithms.config import AlgorithmConfig
from invrl.train.config import TrainConfig
from invrl.types.metrics import resolve

BATCHES = (
    random_batch(0),
    random_batch(1, groups=1, rollouts=1),
    random_batch(2, groups=5),
)
PROMPTS = [[1, 2, 3, 400, 17], [9, 8, 7]]
MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = pytest.mark.parametrize(
    "sharded",
    first_quick([True, False]),
    ids=["distributed_optimizer", "plain_optimizer"],
)
DTYPES = pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def settings(*, sharded: bool, dtype: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "train_dtype": dtype,
            "lr": 1e-3,
            "max_tokens_per_micro_batch": 40,
            "use_distributed_optimizer": sharded,
        }
    )


def learnt(trainer: Trainer) -> list[Arrays]:
    return [trainer.weights(), *(trainer.optimizer_state(name) for name in MOMENTS)]


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
@OPTIMIZERS
@DTYPES
def test_sleeping_trainer_learns_the_same_as_a_trainer_that_never_sleeps(
    pool: RankPool, model: Path, ranks: int, sharded: bool, dtype: str
) -> None:
    train = settings(sharded=sharded, dtype=dtype)
    awake = pool.build(model, ranks=ranks, train=train)
    numbers = [resolve(awake.train(batch, steps=2)) for batch in BATCHES]
    expected = learnt(awake)
    expected_logprobs = awake.logprobs(PROMPTS)
    expected_bytes = awake.each("staged", 1)

    sleeper = pool.build(model, ranks=ranks, train=train)
    sleeper.each("sleep")
    for batch, expected_numbers in zip(BATCHES, numbers, strict=True):
        sleeper.each("wake")
        measured = resolve(sleeper.train(batch, steps=2))
        sleeper.each("sleep")
        for name in ("loss", "grad_norm", "entropy", "optimizer_steps"):
            assert measured[name] == expected_numbers[name], name
    for logprobs, others in zip(
        sleeper.logprobs(PROMPTS), expected_logprobs, strict=True
    ):
        assert np.array_equal(logprobs, others)
    assert sleeper.each("staged", 1) == expected_bytes
    for arrays, others in zip(learnt(sleeper), expected, strict=True):
        check_same_bits(arrays, others)


@DTYPES
def test_sleeping_trainer_frees_gradients_and_moves_the_optimizer_to_the_cpu(
    pool: RankPool, model: Path, dtype: str
) -> None:
    """Float32 weights are the model's own memory; beside bfloat16 ones the optimizer
    has master weights."""
    trainer = pool.build(model, train=settings(sharded=True, dtype=dtype))
    trainer.train(BATCHES[0])
    num_weights = sum(values.size for values in trainer.weights().values())
    [gradient_bytes] = trainer.each("gradient_bytes")
    assert gradient_bytes >= 4 * num_weights
    moved_states = {"float32": 2, "bfloat16": 3}[dtype]
    assert trainer.each("moved_bytes") == [4 * moved_states * num_weights]
    for _ in range(2):  # the second time nothing is left to do
        trainer.each("sleep")
        assert trainer.each("gradient_bytes") == [0]
    for _ in range(2):
        trainer.each("wake")
        assert trainer.each("gradient_bytes") == [gradient_bytes]


@pytest.mark.parametrize("ranks", first_quick([2, 1]))
@OPTIMIZERS
@DTYPES
def test_checkpoint_saved_while_asleep_resumes_exactly(
    pool: RankPool, model: Path, tmp_path: Path, ranks: int, sharded: bool, dtype: str
) -> None:
    """Also one that is saved before the first step, when the optimizer has no state
    yet."""
    train = settings(sharded=sharded, dtype=dtype)
    trainer = pool.build(model, ranks=ranks, train=train)
    trainer.each("sleep")
    trainer.each("save", str(tmp_path / "first"))
    trainer.each("wake")
    trainer.train(BATCHES[0], steps=2)
    trainer.each("sleep")
    trainer.each("save", str(tmp_path / "second"))
    trainer.each("wake")
    trainer.train(BATCHES[2], steps=2)
    expected = learnt(trainer)

    resumed = pool.build(model, ranks=ranks, train=train)
    for path, batches in (
        ("first", (BATCHES[0], BATCHES[2])),
        ("second", (BATCHES[2],)),
    ):
        resumed.each("sleep")
        resumed.each("wake")
        resumed.each("load", str(tmp_path / path))
        for batch in batches:
            resumed.train(batch, steps=2)
        for arrays, others in zip(learnt(resumed), expected, strict=True):
            check_same_bits(arrays, others)


@pytest.mark.slow
def test_critic_on_the_same_ranks_sleeps_too(pool: RankPool, model: Path) -> None:
    train = settings(sharded=True, dtype="bfloat16")
    algorithm = AlgorithmConfig(advantage="gae")
    batches = [rewarded_batch(seed) for seed in range(3)]
    awake = pool.build(model, train=train, algorithm=algorithm)
    for batch in batches:
        awake.train(batch)
    expected = learnt(awake)
    expected_critic = awake.critic_weights()

    sleeper = pool.build(model, train=train, algorithm=algorithm)
    for batch in batches:
        sleeper.each("sleep")
        assert sleeper.each("gradient_bytes") == [0]
        sleeper.each("wake")
        sleeper.train(batch)
    for arrays, others in zip(learnt(sleeper), expected, strict=True):
        check_same_bits(arrays, others)
    check_same_bits(sleeper.critic_weights(), expected_critic)
