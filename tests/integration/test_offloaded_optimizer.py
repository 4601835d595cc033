"""An optimizer in main memory: it learns the same, bit for bit, and its checkpoints are
those of any other optimizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from family_models import make_family_model
from rank_pool import Arrays, RankPool, Trainer
from slow_cases import first_quick
from train_reference import check_same_bits, random_batch

from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve


def silent(batch: TrainBatch) -> TrainBatch:
    """The batch without a gradient."""
    advantages = tuple(advantages_T * 0 for advantages_T in batch.advantages)
    return replace(batch, advantages=advantages)


BATCHES = [
    random_batch(0, groups=2),
    silent(random_batch(1, groups=2)),
    random_batch(2, groups=2),
]
MOMENTS = ("exp_avg", "exp_avg_sq")
ONE = ParallelLayout()
DP2 = ParallelLayout(data=2)
PP2 = ParallelLayout(pipeline=2)
EP2 = ParallelLayout(data=2, expert=2)
TP2_DP2 = ParallelLayout(tensor=2, data=2)
CASES = [
    ("qwen3_moe", EP2, "bfloat16"),
    ("qwen3", DP2, "float32"),
    ("qwen3", PP2, "bfloat16"),
    ("qwen3", ONE, "float32"),
    ("qwen3", TP2_DP2, "bfloat16"),
    ("glm4_moe", PP2, "float32"),
]
SMALL_GROUP = 40_000
"""Bytes of gradients in main memory together. A model has several times as many."""


def settings(*, offloaded: bool, dtype: str = "float32") -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "train_dtype": dtype,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "clip_grad": 0.01,
            "max_tokens_per_micro_batch": 41,
            "optimizer_cpu_offload": offloaded,
        }
    )


def learnt(trainer: Trainer) -> list[Arrays]:
    return [trainer.weights(), *(trainer.optimizer_state(name) for name in MOMENTS)]


def model_of(folder: Path, family: str) -> Path:
    return make_family_model(
        folder / "model", family, num_hidden_layers=2, num_key_value_heads=4
    )


@pytest.mark.parametrize(("family", "layout", "dtype"), first_quick(CASES))
def test_offloaded_optimizer_learns_the_same_bit_for_bit(
    pool: RankPool, tmp_path: Path, family: str, layout: ParallelLayout, dtype: str
) -> None:
    model = model_of(tmp_path, family)
    train = settings(offloaded=False, dtype=dtype)
    plain = pool.build(model, layout=layout, train=train)
    numbers = [resolve(plain.train(batch, steps=2)) for batch in BATCHES]
    expected = learnt(plain)

    train = settings(offloaded=True, dtype=dtype)
    offloaded = pool.build(model, layout=layout, train=train)
    assert min(offloaded.each("stage_gradients", SMALL_GROUP)) > 1
    for batch, expected_numbers in zip(BATCHES, numbers, strict=True):
        measured = resolve(offloaded.train(batch, steps=2))
        for name in ("loss", "grad_norm", "optimizer_steps"):
            assert measured[name] == expected_numbers[name], name
    for arrays, others in zip(learnt(offloaded), expected, strict=True):
        check_same_bits(arrays, others)


@pytest.mark.parametrize(
    ("layout", "saves_offloaded"),
    first_quick([(DP2, True), (DP2, False), (ONE, True), (ONE, False)]),
)
def test_run_resumes_with_or_without_offloading(
    pool: RankPool, tmp_path: Path, layout: ParallelLayout, saves_offloaded: bool
) -> None:
    model = model_of(tmp_path, "qwen3")
    train = settings(offloaded=saves_offloaded, dtype="bfloat16")
    trainer = pool.build(model, layout=layout, train=train)
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[2], steps=2)
    expected = learnt(trainer)

    train = settings(offloaded=not saves_offloaded, dtype="bfloat16")
    resumed = pool.build(model, layout=layout, train=train)
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[2], steps=2)
    for arrays, others in zip(learnt(resumed), expected, strict=True):
        check_same_bits(arrays, others)


def test_sleeping_rank_gives_back_only_gradients(
    pool: RankPool, tmp_path: Path
) -> None:
    """The rest is in main memory already."""
    model = model_of(tmp_path, "qwen3")
    train = settings(offloaded=True, dtype="bfloat16")
    awake = pool.build(model, train=train)
    for batch in BATCHES:
        awake.train(batch)
    expected = learnt(awake)

    sleeper = pool.build(model, train=train)
    [gradient_bytes] = sleeper.each("gradient_bytes")
    for batch in BATCHES:
        sleeper.each("sleep")
        assert sleeper.each("gradient_bytes") == [0]
        sleeper.each("wake")
        assert sleeper.each("gradient_bytes") == [gradient_bytes]
        sleeper.train(batch)
    assert sleeper.each("moved_bytes") == [0]
    for arrays, others in zip(learnt(sleeper), expected, strict=True):
        check_same_bits(arrays, others)
