"""Steps of real ranks over gloo: however a batch is split, resumed or refused, the weights are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_pool import Arrays, RankPool, Trainer
from tiny_model import make_tiny_model
from train_reference import random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.metrics import resolve
from invrl.train.config import TrainConfig
from invrl.types import TrainBatch

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(kl_coef=0.05)
BATCHES = (
    random_batch(0),
    random_batch(1, groups=1, rollouts=1),  # little more than one rollout's tree
    random_batch(2, groups=5),
)


def settings(*, sharded: bool = True, **fields: object) -> TrainConfig:
    given: dict[str, object] = {
        "train_dtype": "float32",
        "lr": 1e-3,
        "max_tokens_per_microbatch": 40,
        "use_distributed_optimizer": sharded,
    }
    return TrainConfig.model_validate(given | fields)


def one_rollout(batch: TrainBatch) -> TrainBatch:
    """A batch that has nothing for a second rank."""
    (sample, advantages_T) = (batch.samples[0], batch.advantages[0])
    return TrainBatch(
        batch_id=batch.batch_id,
        version=batch.version,
        samples=(sample,),
        advantages=(advantages_T,),
        total_tokens=int(sample.loss_mask_T.sum()),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def train_all(trainer: Trainer) -> list[dict[str, float]]:
    """Two mini-batches of each batch, and a batch that leaves a rank without data."""
    numbers = [resolve(trainer.train(batch, steps=2)) for batch in BATCHES]
    return [*numbers, resolve(trainer.train(one_rollout(BATCHES[0])))]


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Path) -> tuple[list[dict[str, float]], Arrays]:
    trainer = pool.build(model, train=settings(sharded=False), algorithm=ALGORITHM)
    return train_all(trainer), trainer.weights()


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed_optimizer", "plain_optimizer"])
def test_two_ranks_take_the_steps_of_one(
    pool: RankPool, model: Path, alone: tuple[list[dict[str, float]], Arrays], sharded: bool
) -> None:
    pair = pool.build(model, ranks=2, train=settings(sharded=sharded), algorithm=ALGORITHM)
    numbers = train_all(pair)
    first, second = pair.each("weights")
    expected_numbers, expected = alone
    assert all(np.array_equal(first[name], second[name]) for name in first)
    gap, name = worst(first, expected)
    assert gap < BOUND, name
    for measured, single in zip(numbers, expected_numbers, strict=True):
        for key in ("loss", "grad_norm", "ratio_max", "clip_fraction", "entropy", "kl_reference", "tokens"):
            assert measured[key] == pytest.approx(single[key], rel=1e-4, abs=1e-6), key


def test_the_distributed_optimizer_changes_nothing(
    pool: RankPool, model: Path, alone: tuple[list[dict[str, float]], Arrays]
) -> None:
    trainer = pool.build(model, train=settings(sharded=True), algorithm=ALGORITHM)
    train_all(trainer)
    gap, name = worst(trainer.weights(), alone[1])
    assert gap < 1e-6, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["distributed_optimizer", "plain_optimizer"])
def test_a_checkpoint_resumes_as_if_nothing_had_happened(
    pool: RankPool, model: Path, tmp_path: Path, sharded: bool, dtype: str
) -> None:
    """Adam's moments and step counts, master weights that bf16 cannot hold, and the schedule are in it."""
    train = settings(sharded=sharded, train_dtype=dtype, lr_decay_style="linear", lr_decay_steps=6)
    trainer = pool.build(model, train=train)
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[2], steps=2)
    expected = trainer.weights()
    resumed = pool.build(model, train=train)
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[2], steps=2)
    weights = resumed.weights()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_learning_rate_follows_its_schedule(pool: RankPool, model: Path, style: str) -> None:
    """Linear warm-up from 0 over 2 steps; then from lr to lr_min at step 6, and no further (cosine: SGDR,
    arXiv 1608.03983, equation 5)."""
    train = settings(
        lr=1e-3,
        lr_min=1e-4,
        lr_warmup_steps=2,
        lr_decay_style=style,
        lr_decay_steps=6 if style != "constant" else 0,
    )
    trainer = pool.build(model, train=train)
    rates = [resolve(trainer.train(BATCHES[2]))["lr"] for _ in range(8)]
    done = [min(1.0, max(0.0, (step - 2) / 4)) for step in range(8)]
    decay = {
        "constant": lambda x: 1e-3,
        "linear": lambda x: 1e-3 - 9e-4 * x,
        "cosine": lambda x: 1e-4 + 9e-4 * 0.5 * (1 + np.cos(np.pi * x)),
    }[style]
    expected = [1e-3 * step / 2 if step < 2 else decay(done[step]) for step in range(8)]
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1)])
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(
    pool: RankPool, model: Path, tmp_path: Path, saving: int, loading: int
) -> None:
    trainer = pool.build(model, ranks=saving, train=settings())
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[2], steps=2)
    expected = trainer.weights()
    resumed = pool.build(model, ranks=loading, train=settings())
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[2], steps=2)
    gap, name = worst(resumed.weights(), expected)
    assert gap < BOUND, name


def test_a_checkpoint_is_never_written_over_another_nor_read_from_nothing(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    trainer = pool.build(model)
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="not empty"):
        trainer.each("save", str(tmp_path))
    with pytest.raises(TrainError, match="no checkpoint"):
        trainer.each("load", str(tmp_path / "none"))


def test_steps_too_small_for_bf16_add_up(pool: RankPool, model: Path) -> None:
    """A norm's weight is near 1, where bf16 has steps of 0.004 or more; Adam moves it by 0.0002."""
    trainer = pool.build(model, train=settings(train_dtype="bfloat16", lr=2e-4))

    def norms() -> np.ndarray:
        return np.concatenate([w for name, w in trainer.weights().items() if "norm" in name])

    before = norms()
    for _ in range(3):
        trainer.train(BATCHES[0])
    assert (norms() == before).all()
    for _ in range(37):
        trainer.train(BATCHES[0])
    assert (norms() != before).mean() > 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_changes_nothing(pool: RankPool, model: Path, bad: float) -> None:
    """Not even what comes after: the next batch is trained as if the bad one had never been."""
    trainer = pool.build(model, train=settings())
    start = trainer.weights()
    batch = random_batch(5)
    batch.advantages[2][np.flatnonzero(batch.samples[2].loss_mask_T)[0]] = bad
    with pytest.raises(TrainError, match="no weight was changed"):
        trainer.train(batch)
    assert all(np.array_equal(weight, start[name]) for name, weight in trainer.weights().items())
    trainer.train(BATCHES[0])
    after = trainer.weights()
    fresh = pool.build(model, train=settings())
    fresh.train(BATCHES[0])
    assert all(np.array_equal(weight, after[name]) for name, weight in fresh.weights().items())


def test_a_gradient_that_is_not_finite_changes_nothing(pool: RankPool, model: Path) -> None:
    """The loss of this surrogate is 0, its gradient is not a number."""
    trainer = pool.build(
        model, train=settings(), algorithm=AlgorithmConfig(policy_loss="broken_surrogate:root_of_zero")
    )
    start = trainer.weights()
    with pytest.raises(TrainError, match="gradient norm is nan"):
        trainer.train(BATCHES[0])
    assert all(np.array_equal(weight, start[name]) for name, weight in trainer.weights().items())


@pytest.mark.parametrize("bound", [0.0, 0.1])
def test_the_gradient_norm_is_bounded(pool: RankPool, model: Path, bound: float) -> None:
    """Plain SGD shows it: a step is lr times the clipped gradient. 0: no bound."""
    trainer = pool.build(
        model,
        train=settings(clip_grad=bound, lr=0.1, sharded=False),
        megatron={"optimizer": "sgd", "sgd_momentum": 0.0},
    )
    start = trainer.weights()
    norm = resolve(trainer.train(BATCHES[0]))["grad_norm"]
    (step,) = trainer.steps()
    assert norm > 0.2
    factor = 0.1 * (bound / norm if bound else 1.0)
    for name, weight in step.weights.items():
        assert weight == pytest.approx(start[name] - factor * step.gradients[name], rel=1e-6, abs=1e-7)
    moved = np.sqrt(sum(np.sum((weight - start[name]) ** 2) for name, weight in step.weights.items()))
    assert moved == pytest.approx(0.1 * (bound or norm), rel=1e-3)
