"""Every layout of ranks trains an adapter as one process does: its start, gradients, the
weights that engines get, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from adapter_folders import make_adapter
from family_models import make_family_model
from rank_pool import Arrays, RankPool, Step, Trainer
from slow_cases import named_quick
from train_reference import check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(kl={"coefficient": 0.05})
BATCHES = [random_batch(seed, groups=2) for seed in range(2)]
SMOOTH = {"adam_eps": 1e-2}
"""As in `test_layouts.py`: else the last bit decides a first step's sign."""
CASES: Mapping[str, tuple[str, ParallelLayout]] = {
    "llama tp2": ("llama", ParallelLayout(tensor=2)),
    "qwen2 tp2": ("qwen2", ParallelLayout(tensor=2)),
    "gemma3_text tp2pp2": ("gemma3_text", ParallelLayout(tensor=2, pipeline=2)),
    "llama dp2": ("llama", ParallelLayout(data=2)),
    "llama cp2": ("llama", ParallelLayout(context=2)),
    "llama pp2": ("llama", ParallelLayout(pipeline=2)),
    "mistral pp2vpp2": ("mistral", ParallelLayout(pipeline=2, virtual_pipeline=2)),
    "llama tp2dp2": ("llama", ParallelLayout(tensor=2, data=2)),
    "qwen3_moe ep2": ("qwen3_moe", ParallelLayout(data=2, expert=2)),
    "qwen3_moe tp2": ("qwen3_moe", ParallelLayout(tensor=2)),
    "glm4_moe tp2ep2": ("glm4_moe", ParallelLayout(tensor=2, expert=2)),
    "deepseek_v3 tp2ep2": ("deepseek_v3", ParallelLayout(tensor=2, expert=2)),
    "deepseek_v3 pp2": ("deepseek_v3", ParallelLayout(pipeline=2)),
}
DEEP = ("gemma3_text", "mistral")
"""Families whose cases divide four layers."""
QUICK = ("llama tp2", "llama dp2", "llama pp2", "qwen3_moe ep2", "deepseek_v3 tp2ep2")


def settings(*, path: Path | None, sharded: bool = True) -> TrainConfig:
    lora: dict[str, object] = {"rank": 4, "alpha": 8.0}
    if path is not None:
        lora["path"] = str(path)
    return TrainConfig.model_validate(
        {
            "train_dtype": "float32",
            "lr": 1e-3,
            "max_tokens_per_micro_batch": 41,
            "use_distributed_optimizer": sharded,
            "lora": lora,
        }
    )


@dataclass(frozen=True, slots=True)
class Record:
    """What a trainer did with all batches."""

    numbers: list[dict[str, float]]
    steps: list[Step]
    served: Arrays
    """Weights that engines get after them."""


def train_all(trainer: Trainer) -> Record:
    numbers = [resolve(trainer.train(batch)) for batch in BATCHES]
    return Record(numbers, trainer.steps(), trainer.each("merged_weights")[0])


Folders = Callable[[str], tuple[Path, Path]]
Alone = Callable[[str], Record]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model of the shape that `test_layouts.py` has, and an adapter to begin with."""
    folder = tmp_path_factory.mktemp("adapters")

    @cache
    def make(family: str) -> tuple[Path, Path]:
        fields: dict[str, object] = {}
        if family == "gemma3_text":
            fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
        model = make_family_model(
            folder / family,
            family,
            num_hidden_layers=4 if family in DEEP else 2,
            num_attention_heads=8,
            num_key_value_heads=8 if family == "deepseek_v3" else 4,
            head_dim=16,
            **fields,
        )
        return model, make_adapter(folder / f"{family}-adapter", model)

    return make


@pytest.fixture(scope="module")
def alone(pool: RankPool, folders: Folders) -> Alone:
    """The same steps in one process."""

    @cache
    def record(family: str) -> Record:
        model, adapter = folders(family)
        train = settings(path=adapter, sharded=False)
        return train_all(
            pool.build(model, train=train, algorithm=ALGORITHM, megatron=SMOOTH)
        )

    return record


@pytest.mark.parametrize("case", named_quick(CASES, *QUICK))
def test_a_layout_trains_an_adapter_as_one_process_does(
    pool: RankPool,
    folders: Folders,
    alone: Alone,
    case: tuple[str, ParallelLayout],
) -> None:
    family, layout = case
    expected = alone(family)
    model, adapter = folders(family)
    trainer = pool.build(
        model,
        layout=layout,
        train=settings(path=adapter),
        algorithm=ALGORITHM,
        megatron=SMOOTH,
    )
    found = train_all(trainer)
    for found_numbers, expected_numbers in zip(
        found.numbers, expected.numbers, strict=True
    ):
        for name in ("grad_norm", "kl_reference", "entropy"):
            assert found_numbers[name] == pytest.approx(
                expected_numbers[name], rel=1e-5, abs=1e-6
            ), name
    for found_step, expected_step in zip(found.steps, expected.steps, strict=True):
        for of in ("gradients", "weights"):
            gap, name = worst(getattr(found_step, of), getattr(expected_step, of))
            assert gap < BOUND, f"{of}: {name}"
    gap, name = worst(found.served, expected.served)
    assert gap < BOUND, name


@pytest.mark.parametrize("case", named_quick(CASES, "llama tp2", "deepseek_v3 tp2ep2"))
def test_an_adapter_begins_alike_in_every_layout(
    pool: RankPool, folders: Folders, case: tuple[str, ParallelLayout]
) -> None:
    family, layout = case
    model, _ = folders(family)
    expected = pool.build(model, train=settings(path=None)).weights()
    found = pool.build(model, layout=layout, train=settings(path=None)).weights()
    check_same_bits(found, expected)
    assert all(array.any() == ("lora_A" in name) for name, array in found.items())


@pytest.mark.parametrize("case", named_quick(CASES, "llama tp2", "qwen3_moe ep2"))
def test_the_arena_gets_the_merged_parts_of_every_rank(
    pool: RankPool, folders: Folders, case: tuple[str, ParallelLayout]
) -> None:
    """The ranks write a slot together, and the checksums are those of the collected
    weights."""
    family, layout = case
    model, adapter = folders(family)
    trainer = pool.build(model, layout=layout, train=settings(path=adapter))
    trainer.train(BATCHES[0])
    staged = trainer.each("staged", 1)[0]
    assert staged == trainer.each("merged_checksums")[0]


@pytest.mark.parametrize("case", named_quick(CASES, "llama tp2", "qwen3_moe ep2"))
def test_another_layout_continues_a_checkpoint(
    pool: RankPool,
    tmp_path: Path,
    folders: Folders,
    alone: Alone,
    case: tuple[str, ParallelLayout],
) -> None:
    family, layout = case
    model, adapter = folders(family)
    train = settings(path=adapter)
    first = pool.build(
        model, layout=layout, train=train, algorithm=ALGORITHM, megatron=SMOOTH
    )
    first.train(BATCHES[0])
    first.each("save", str(tmp_path / "state"))
    second = pool.build(model, train=train, algorithm=ALGORITHM, megatron=SMOOTH)
    second.each("load", str(tmp_path / "state"))
    second.train(BATCHES[1])
    [step] = second.steps()
    gap, name = worst(step.weights, alone(family).steps[1].weights)
    assert gap < BOUND, name
