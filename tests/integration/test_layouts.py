"""Every layout of ranks over gloo takes the steps of one process: log-probs, losses,
gradients, the optimizer's state, the weights that engines get, and checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import CONFIGS, make_family_model
from numpy.typing import NDArray
from rank_pool import Arrays, RankPool, Step, Trainer
from safetensors.torch import load_file, save_file
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import random_batch, relative, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import ConfigError
from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve
from invrl.weights.tensors.tensor_spec import checksum

BOUND = 1e-5  # norm-relative, per tensor
WITH_EXPERTS = [
    family for family, fields in CONFIGS.items() if "num_experts_per_tok" in fields
]
DENSE = sorted(CONFIGS.keys() - set(WITH_EXPERTS))
TP2 = ParallelLayout(tensor=2)
TP4 = ParallelLayout(tensor=4)
TP2_DP2 = ParallelLayout(tensor=2, data=2)
DP2 = ParallelLayout(data=2)
CP2 = ParallelLayout(context=2)
ONE = ParallelLayout()
PP2 = ParallelLayout(pipeline=2)
PP4 = ParallelLayout(pipeline=4)
PP2_VPP2 = ParallelLayout(pipeline=2, virtual_pipeline=2)
PP2_DP2 = ParallelLayout(pipeline=2, data=2)
PP2_VPP2_DP2 = ParallelLayout(pipeline=2, virtual_pipeline=2, data=2)
TP2_PP2 = ParallelLayout(tensor=2, pipeline=2)
PP3_FIRST2 = ParallelLayout(pipeline=3, first_stage_layers=2)
PP2_VPP2_LAST4 = ParallelLayout(pipeline=2, virtual_pipeline=2, last_stage_layers=4)
DENSE_DEEPSEEK = "deepseek_v3 without experts"
EP2 = ParallelLayout(data=2, expert=2)
EP2_OF_DP4 = ParallelLayout(data=4, expert=2)
EP4 = ParallelLayout(data=4, expert=4)
EP2_PP2 = ParallelLayout(data=2, pipeline=2, expert=2)
EP2_CP2 = ParallelLayout(context=2, expert=2)
EP2_CP2_DP2 = ParallelLayout(context=2, data=2, expert=2)
TP2_EP2 = ParallelLayout(tensor=2, expert=2)
TP2_EP2_DP2 = ParallelLayout(tensor=2, data=2, expert=2)
CASES = [
    # Every family, on what divides its layers, their heads, and a row.
    *[(family, layout) for family in DENSE for layout in (TP2, PP2, CP2)],
    *[(family, layout) for family in WITH_EXPERTS for layout in (PP2, CP2)],
    (DENSE_DEEPSEEK, TP2),
    # One dense model with tied embeddings and one without, and one with experts, on the
    # others.
    *[("gemma3_text", layout) for layout in (PP2_VPP2, TP2_PP2)],
    *[("qwen3", layout) for layout in (TP4, PP4, TP2_DP2, TP2_PP2, PP2_VPP2_DP2)],
    *[("qwen3", layout) for layout in (PP3_FIRST2, PP2_VPP2_LAST4)],
    ("qwen3", ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2)),
    *[
        ("qwen3", ParallelLayout(context=2, **{axis: 2}))
        for axis in ("tensor", "pipeline", "data")
    ],
    *[("qwen3_moe", layout) for layout in (DP2, PP2_VPP2, PP2_DP2)],
    *[
        ("qwen3_moe", layout)
        for layout in (TP2, EP2, EP2_OF_DP4, EP4, EP2_PP2, TP2_EP2_DP2)
    ],
    *[("glm4_moe", layout) for layout in (DP2, TP2, EP2, TP2_EP2, EP2_CP2)],
    *[("deepseek_v3", layout) for layout in (DP2, TP2_EP2)],
]
"""TP4 is as many ranks as the models have key-value heads."""
ALGORITHM = AlgorithmConfig(kl={"coefficient": 0.05})
BATCHES = [random_batch(seed, groups=2) for seed in range(3)]
NUMBERS = (
    "loss",
    "grad_norm",
    "entropy",
    "kl_reference",
    "ratio_max",
    "clip_fraction",
    "tokens",
    "row_tokens",
)
SMOOTH = {"adam_eps": 1e-2}
"""With Adam's usual eps the first step is the sign of the gradient: where that is
nearly 0 the last bit decides, and the weights would differ from then on."""


def title(layout: ParallelLayout) -> str:
    """Sizes of 1, and layers of the first or last stage that are not set, are left
    out."""
    axes = {
        "tp": layout.tensor,
        "cp": layout.context,
        "pp": layout.pipeline,
        "vpp": layout.virtual_pipeline,
        "first": layout.first_stage_layers,
        "last": layout.last_stage_layers,
        "dp": layout.data,
        "ep": layout.expert,
    }
    return "".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "one"


def case_title(value: object) -> str:
    if isinstance(value, ParallelLayout):
        return title(value)
    return value if isinstance(value, str) else f"sharded={value}"


def settings(*, sharded: bool = True, max_tokens: int = 41) -> TrainConfig:
    return TrainConfig(
        train_dtype="float32",
        lr=1e-3,
        max_tokens_per_micro_batch=max_tokens,
        use_distributed_optimizer=sharded,
    )


@dataclass(frozen=True, slots=True)
class Record:
    """What a trainer did with all batches."""

    logprobs: list[dict[int, NDArray[np.float32]]]
    """Of each batch before its step, by the sample's place in the batch."""
    numbers: list[dict[str, float]]
    steps: list[Step]


def logprobs_by_place(
    trainer: Trainer, batch: TrainBatch
) -> dict[int, NDArray[np.float32]]:
    shards = shard_batch(batch, ranks=trainer.layout.data, steps=1)
    samples = [
        sample
        for shard in shards
        for mini_batch in shard
        for sample in mini_batch.samples
    ]
    place = {id(sample): index for index, sample in enumerate(batch.samples)}
    arrays = trainer.token_logprobs(batch)
    return {
        place[id(sample)]: array for sample, array in zip(samples, arrays, strict=True)
    }


def train_all(trainer: Trainer) -> Record:
    """Two mini-batches of the first batch, one of each other."""
    logprobs = []
    numbers = []
    for index, batch in enumerate(BATCHES):
        logprobs.append(logprobs_by_place(trainer, batch))
        numbers.append(resolve(trainer.train(batch, steps=2 if index == 0 else 1)))
    return Record(logprobs, numbers, trainer.steps())


def check_equal(found: Record, expected: Record) -> None:
    for found_numbers, expected_numbers in zip(
        found.numbers, expected.numbers, strict=True
    ):
        for name in NUMBERS:
            # The loss is the mean of terms of about 1 and of both signs, which cancel.
            bound = 1e-5 if name == "loss" else 1e-6
            expected_number = pytest.approx(expected_numbers[name], rel=1e-5, abs=bound)
            assert found_numbers[name] == expected_number, name
    for found_batch, expected_batch in zip(
        found.logprobs, expected.logprobs, strict=True
    ):
        for index, expected_T in expected_batch.items():
            if expected_T.any():
                assert relative(found_batch[index], expected_T) < BOUND
    check_same_steps(found.steps, expected.steps)


def check_same_steps(found: list[Step], expected: list[Step]) -> None:
    assert len(found) == len(expected)
    for index, (found_step, expected_step) in enumerate(
        zip(found, expected, strict=True)
    ):
        for of in ("gradients", "weights"):
            gap, name = worst(getattr(found_step, of), getattr(expected_step, of))
            assert gap < BOUND, f"{of} of step {index}: {name} is off by {gap:.1e}"


Models = Callable[[str, int], Path]
Alone = Callable[[str, int], Record]


def layers_for(layout: ParallelLayout) -> int:
    """As few as there can be."""
    own_numbers = [
        layers
        for layers in (layout.first_stage_layers, layout.last_stage_layers)
        if layers
    ]
    num_others = layout.pipeline - len(own_numbers)
    return max(2, num_others * layout.virtual_pipeline + sum(own_numbers))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models of so many layers, half of the families with tied embeddings."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def model(family: str, layers: int) -> Path:
        fields: dict[str, object] = {}
        if family == "gemma3_text":
            fields["layer_types"] = ["sliding_attention", "full_attention"] * (
                layers // 2
            )
        if family == DENSE_DEEPSEEK:
            fields["first_k_dense_replace"] = layers
        model_type = family.partition(" ")[0]
        return make_family_model(
            folder / f"{family}-{layers}",
            model_type,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8 if model_type == "deepseek_v3" else 4,
            head_dim=16,
            tie_word_embeddings=family in ("gemma3_text", "llama", "qwen2"),
            **fields,
        )

    return model


@pytest.fixture(scope="module")
def alone(pool: RankPool, models: Models) -> Alone:
    """The same steps in one process."""

    @cache
    def record(family: str, layers: int) -> Record:
        plain = settings(sharded=False)
        model = models(family, layers)
        return train_all(
            pool.build(model, train=plain, algorithm=ALGORITHM, megatron=SMOOTH)
        )

    return record


def cases_of_families_and_layouts() -> list[pytest.ParameterSet]:
    """One case is quick of each kind of layout, that is of axes that it divides.
    Families take turns."""
    families_by_kind: dict[str, list[tuple[str, ParallelLayout]]] = {}
    for family, layout in CASES:
        kind = re.sub(r"\d", "", title(layout))
        families_by_kind.setdefault(kind, []).append((family, layout))
    turns: Counter[str] = Counter()
    quick: list[tuple[str, ParallelLayout]] = []
    for cases_of_kind in families_by_kind.values():
        chosen = min(cases_of_kind, key=lambda case: turns[case[0]])
        turns[chosen[0]] += 1
        quick.append(chosen)
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{title(case[1])}",
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in CASES
    ]


@pytest.mark.parametrize(("family", "layout"), cases_of_families_and_layouts())
def test_each_layout_takes_the_same_steps_as_one_process(
    pool: RankPool,
    models: Models,
    alone: Alone,
    tmp_path: Path,
    family: str,
    layout: ParallelLayout,
) -> None:
    """And engines are sent what was loaded, then what is exported, byte for byte."""
    expected = alone(family, layers_for(layout))
    model = models(family, layers_for(layout))
    trainer = pool.build(
        model, layout=layout, train=settings(), algorithm=ALGORITHM, megatron=SMOOTH
    )
    source = load_file(model / "model.safetensors")
    replica = pool_calls(trainer)
    assert replica("staged", 0) == {
        name: checksum(tensor) for name, tensor in source.items()
    }
    found = train_all(trainer)
    check_equal(found, expected)
    replica("export", str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert replica("staged", 1) == {
        name: checksum(tensor) for name, tensor in exported.items()
    }
    # all that is exported but a router's bias, which no optimizer trains
    trained = found.steps[-1].weights
    gap, name = worst({name: exported[name].numpy() for name in trained}, trained)
    assert gap == 0.0, name


def pool_calls(trainer: Trainer) -> Callable[[str, object], object]:
    """Calls a method on the ranks of the first copy; the answer of the rank that
    collects weights."""
    first_copy = trainer.part(trainer.layout.model_copy(0))
    return lambda method, argument: first_copy.each(method, argument)[0]


@pytest.mark.parametrize(
    ("family", "layout", "sharded"),
    first_quick(
        [
            ("qwen3", PP2_VPP2_DP2, True),
            ("qwen3", TP2_DP2, False),
            ("qwen3_moe", EP2_CP2_DP2, True),
        ]
    ),
    ids=lambda value: title(value) if isinstance(value, ParallelLayout) else str(value),
)
def test_overlapped_gradient_reduction_gives_the_same_steps(
    pool: RankPool,
    models: Models,
    alone: Alone,
    family: str,
    layout: ParallelLayout,
    sharded: bool,
) -> None:
    """In several buckets (on later stages in one, as Megatron has it), from the second
    step on. In each step a rank has another number of micro-batches, and only the last
    of them reduces."""
    trainer = pool.build(
        models(family, layers_for(layout)),
        layout=layout,
        train=settings(sharded=sharded, max_tokens=16),
        algorithm=ALGORITHM,
        megatron=SMOOTH | {"overlap_grad_reduce": True, "bucket_size": 5000},
    )
    assert trainer.each("buckets")[0] > 1
    check_equal(train_all(trainer), alone(family, layers_for(layout)))


def test_grammar_mask_may_allow_tokens_of_any_vocabulary_shard(
    pool: RankPool, models: Models
) -> None:
    """Of all ranks, of the first or of the last alone; where its bits begin within a
    byte, too."""
    rng = np.random.default_rng(0)
    vocab = 520
    model = make_tiny_model(
        models("qwen3", 2).parent / "odd", heads=8, kv_heads=4, vocab_size=vocab
    )
    rows = []
    for first, last in ((0, vocab), (0, 100), (400, vocab), (129, 131)):
        tokens_T = rng.integers(first, last, 9).astype(np.int32)
        kept = (np.arange(vocab) >= first) & (np.arange(vocab) < last)
        mask = np.packbits(kept, bitorder="little").tobytes()
        wanted_N = np.arange(1, 9)
        rows.append(
            TokenSequence(
                tokens_T=tokens_T,
                wanted_N=wanted_N,
                temperature=0.7,
                allowed_N=(*[mask] * 7, None),
            )
        )
    [expected] = pool.build(model, train=settings()).each("row_logprobs", rows)
    for found in pool.build(model, layout=TP4, train=settings()).each(
        "row_logprobs", rows
    ):
        for found_T, expected_T in zip(found, expected, strict=True):
            assert relative(found_T, expected_T) < BOUND


@pytest.mark.parametrize(
    ("family", "layout", "sharded"),
    first_quick(
        [
            ("qwen3_moe", TP2_EP2_DP2, True),
            ("qwen2", TP2, True),
            ("qwen2", TP2_DP2, True),
            ("qwen2", TP2_DP2, False),
            ("qwen2", TP2_PP2, True),
            ("qwen2", PP2_VPP2, True),
            ("qwen2", PP2_DP2, False),
            ("qwen3_moe", EP2_OF_DP4, True),
            ("qwen3_moe", EP2_OF_DP4, False),
            ("qwen3_moe", TP2, False),
        ]
    ),
    ids=case_title,
)
def test_equal_gradients_give_equal_updates_in_every_layout(
    pool: RankPool,
    models: Models,
    tmp_path: Path,
    family: str,
    layout: ParallelLayout,
    sharded: bool,
) -> None:
    """Moments, clipping by the norm over all ranks, and weights, whatever computed the
    gradients."""
    model = models(family, 4)
    random = torch.Generator().manual_seed(1)
    gradients = [
        write_gradients(model, tmp_path / str(step), random) for step in range(3)
    ]
    single = pool.build(model, train=settings(sharded=False))
    expected = apply_all(single, gradients)
    found = apply_all(
        pool.build(model, layout=layout, train=settings(sharded=sharded)), gradients
    )
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for found_tensors, expected_tensors in zip(found[1], expected[1], strict=True):
        gap, name = worst(found_tensors, expected_tensors)
        assert gap < 1e-6, name


def write_gradients(model: Path, folder: Path, random: torch.Generator) -> Path:
    """A folder like the model's, with random tensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    source = load_file(model / "model.safetensors")
    drawn = {
        name: torch.randn(tensor.shape, generator=random)
        for name, tensor in source.items()
    }
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def apply_all(
    trainer: Trainer, gradients: list[Path]
) -> tuple[list[float], list[Arrays]]:
    """The norms of the gradients; then weights and moments after all of them."""
    norms = [trainer.each("inject", str(folder))[0] for folder in gradients]
    moments = [
        trainer.optimizer_state("exp_avg"),
        trainer.optimizer_state("exp_avg_sq"),
    ]
    return norms, [trainer.weights(), *moments]


@pytest.mark.parametrize("layout", first_quick([PP2, TP2]), ids=title)
def test_step_with_a_loss_that_is_not_finite_is_skipped_on_all_ranks(
    pool: RankPool, models: Models, layout: ParallelLayout
) -> None:
    """Only the last pipeline stage has the loss. The step after it is as if it had
    never been."""
    model = models("qwen3", 2)
    trainer = pool.build(model, layout=layout, train=settings())
    start = trainer.weights()
    bad = random_batch(5, groups=2)
    bad.advantages[0][np.flatnonzero(bad.samples[0].loss_mask_T)[0]] = np.nan
    assert resolve(trainer.train(bad))["nonfinite_steps"] == 1
    assert worst(trainer.weights(), start)[0] == 0.0
    trainer.train(BATCHES[0])
    after = trainer.weights()
    fresh = pool.build(model, layout=layout, train=settings())
    fresh.train(BATCHES[0])
    assert worst(after, fresh.weights())[0] == 0.0


def test_context_ranks_take_a_sample_longer_than_one_ranks_limit(
    pool: RankPool, models: Models
) -> None:
    """77 tokens, where one rank takes 41 and two take 82."""
    model = models("qwen3", 2)
    batch = random_batch(10, groups=1, rollouts=2, prompt=60, answer=14)
    assert max(len(sample.tokens_T) for sample in batch.samples) == 77
    trainer = pool.build(
        model, layout=CP2, train=settings(), algorithm=ALGORITHM, megatron=SMOOTH
    )
    trainer.train(batch)
    steps = trainer.steps()
    single = pool.build(
        model, train=settings(sharded=False), algorithm=ALGORITHM, megatron=SMOOTH
    )
    single.train(batch)
    check_same_steps(steps, single.steps())


def test_comparison_finds_a_gradient_that_is_not_reduced(
    pool: RankPool, models: Models, alone: Alone
) -> None:
    trainer = pool.build(
        models("qwen3", 2),
        layout=TP2,
        train=settings(),
        algorithm=ALGORITHM,
        megatron=SMOOTH,
    )
    trainer.each("leave_unreduced", "decoder.layers.1.input_layernorm.weight")
    trainer.train(BATCHES[0], steps=2)
    with pytest.raises(
        AssertionError,
        match=r"gradients of step 0: model.layers.1.input_layernorm.weight",
    ):
        check_same_steps(trainer.steps(), alone("qwen3", 2).steps[:2])


@pytest.mark.slow
def test_comparison_finds_a_data_shard_that_is_skipped(
    pool: RankPool, models: Models, alone: Alone
) -> None:
    trainer = pool.build(
        models("qwen3", 2),
        layout=TP2_DP2,
        train=settings(),
        algorithm=ALGORITHM,
        megatron=SMOOTH,
    )
    first, second = shard_batch(BATCHES[0], ranks=2, steps=2)
    nothing = tuple(
        replace(mini_batch, samples=(), advantages=()) for mini_batch in second
    )
    trainer.train_shards([first, nothing])
    with pytest.raises(AssertionError, match="gradients of step 0"):
        check_same_steps(trainer.steps(), alone("qwen3", 2).steps[:2])


@pytest.mark.parametrize("layout", first_quick([EP2_OF_DP4, TP2]), ids=title)
def test_comparison_finds_expert_gradients_that_are_not_reduced(
    pool: RankPool, models: Models, alone: Alone, layout: ParallelLayout
) -> None:
    """Over the ranks that have the same experts."""
    model = models("qwen3_moe", 2)
    trainer = pool.build(
        model, layout=layout, train=settings(), algorithm=ALGORITHM, megatron=SMOOTH
    )
    trainer.each("leave_experts_unreduced")
    trainer.train(BATCHES[0], steps=2)
    with pytest.raises(
        AssertionError, match=r"gradients of step 0: model.layers.1.mlp.experts"
    ):
        check_same_steps(trainer.steps(), alone("qwen3_moe", 2).steps[:2])


def test_replica_without_samples_computes_experts_for_other_ranks(
    pool: RankPool, models: Models, alone: Alone
) -> None:
    """It takes part in as many micro-batches as the ranks with which it divides the
    experts."""
    model = models("qwen3_moe", 2)
    trainer = pool.build(
        model, layout=EP2, train=settings(), algorithm=ALGORITHM, megatron=SMOOTH
    )
    [everything] = shard_batch(BATCHES[0], ranks=1, steps=2)
    nothing = tuple(
        replace(mini_batch, samples=(), advantages=()) for mini_batch in everything
    )
    trainer.train_shards([nothing, everything])
    check_same_steps(trainer.steps(), alone("qwen3_moe", 2).steps[:2])


@pytest.mark.parametrize(
    ("family", "saving", "loading", "sharded"),
    first_quick(
        [
            ("qwen2", TP2_PP2, PP2_DP2, True),
            ("qwen2", TP2, TP2, True),
            ("qwen2", TP2, TP2, False),
            ("qwen2", TP2, DP2, True),
            ("qwen2", ONE, TP2_DP2, True),
            ("qwen2", TP2_DP2, ONE, False),
            ("qwen2", PP2_VPP2, PP2_VPP2, True),
            ("qwen2", PP3_FIRST2, TP4, True),
            ("qwen2", ONE, PP2_VPP2, False),
            ("qwen2", CP2, CP2, True),
            ("qwen2", CP2, PP2_DP2, True),
            ("qwen3_moe", EP2, EP2, True),
            ("qwen3_moe", DP2, EP2, True),
            ("qwen3_moe", EP2, ONE, True),
            ("qwen3_moe", EP2_OF_DP4, TP2_EP2, True),
            ("qwen3_moe", TP2, EP4, False),
        ]
    ),
    ids=case_title,
)
def test_checkpoint_is_loaded_by_any_layout(
    pool: RankPool,
    models: Models,
    tmp_path: Path,
    family: str,
    saving: ParallelLayout,
    loading: ParallelLayout,
    sharded: bool,
) -> None:
    """Bit for bit by the same one."""
    train = settings(sharded=sharded)
    trainer = pool.build(models(family, 4), layout=saving, train=train, megatron=SMOOTH)
    trainer.train(BATCHES[0], steps=2)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[1], steps=2)
    expected = trainer.weights()
    resumed = pool.build(
        models(family, 4), layout=loading, train=train, megatron=SMOOTH
    )
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[1], steps=2)
    gap, name = worst(resumed.weights(), expected)
    assert gap < (BOUND if saving != loading else 1e-12), name


@pytest.mark.parametrize(
    ("family", "saving", "loading", "sharded"),
    first_quick(
        [
            ("deepseek_v3", PP2, ONE, True),
            ("deepseek_v3", PP2, ONE, False),
            ("deepseek_v3", ONE, PP2, True),
            ("deepseek_v3", ONE, PP2, False),
            ("glm4_moe", PP2, PP2, True),
            ("glm4_moe", PP2, TP2, False),
            ("glm4_moe", PP2_DP2, EP2, True),
            ("glm4_moe", EP2_PP2, ONE, True),
            ("qwen3_moe", PP2, ONE, True),
            ("qwen3_moe", PP2_DP2, PP2, False),
        ]
    ),
    ids=case_title,
)
def test_a_stage_without_experts_saves_and_loads_what_the_others_have(
    pool: RankPool,
    tmp_path: Path,
    family: str,
    saving: ParallelLayout,
    loading: ParallelLayout,
    sharded: bool,
) -> None:
    """The first layer is dense, so the optimizer of the experts is empty on the first
    of two stages. Two steps after the checkpoint every weight is as without it."""
    model = make_family_model(
        tmp_path / "model", family, num_hidden_layers=2, num_key_value_heads=4
    )
    train = settings(sharded=sharded)
    trainer = pool.build(model, layout=saving, train=train, megatron=SMOOTH)
    trainer.train(BATCHES[0], steps=3)
    trainer.each("save", str(tmp_path / "saved"))
    trainer.train(BATCHES[1], steps=2)
    expected = trainer.weights()
    resumed = pool.build(model, layout=loading, train=train, megatron=SMOOTH)
    resumed.each("load", str(tmp_path / "saved"))
    resumed.train(BATCHES[1], steps=2)
    gap, name = worst(resumed.weights(), expected)
    assert gap < (BOUND if saving != loading else 1e-12), name


@pytest.mark.slow
def test_exporting_experts_needs_the_memory_of_one_bucket(
    pool: RankPool, tmp_path: Path
) -> None:
    model = make_family_model(
        tmp_path / "model",
        "qwen3_moe",
        num_experts=32,
        moe_intermediate_size=512,
        num_hidden_layers=4,
    )
    size = (model / "model.safetensors").stat().st_size
    trainer = pool.build(model, layout=EP2, train=settings())
    trainer.train(BATCHES[0])
    trainer.each("bucket_bytes", 1 << 20)
    grown = trainer.each("growth", ("export", str(tmp_path / "exported")))
    print(f"{max(grown) / 2**20:.1f} MiB to collect {size / 2**20:.1f} MiB")
    assert max(grown) < size / 4


@pytest.mark.parametrize("layout", first_quick([TP2, PP2]), ids=title)
def test_exporting_weights_needs_the_memory_of_one_bucket(
    pool: RankPool, tmp_path: Path, layout: ParallelLayout
) -> None:
    """On the rank that collects and on the one that sends."""
    model = make_tiny_model(
        tmp_path / "model", layers=12, hidden=256, heads=4, kv_heads=4
    )
    size = (model / "model.safetensors").stat().st_size
    trainer = pool.build(model, layout=layout, train=settings())
    trainer.train(BATCHES[0])
    trainer.each("bucket_bytes", 1 << 20)
    grown = trainer.each("growth", ("export", str(tmp_path / "exported")))
    assert max(grown) < size / 4


@pytest.mark.parametrize("layout", first_quick([TP2, PP2]), ids=title)
def test_weights_of_a_bucket_are_those_of_the_whole_model(
    pool: RankPool, models: Models, layout: ParallelLayout
) -> None:
    trainer = pool.build(models("qwen3", 2), layout=layout, train=settings())
    trainer.train(BATCHES[0])
    collected, *others = trainer.each("exported_twice", 10_000)
    at_once, in_buckets = collected
    assert at_once == in_buckets
    assert len(at_once) > 10
    assert others == [({}, {})]


def test_layout_that_does_not_divide_the_model_is_refused(
    pool: RankPool, models: Models
) -> None:
    with pytest.raises(
        ConfigError, match=r"does not divide .*num_key_value_heads 4.* 1, 2 or 4"
    ):
        pool.build(models("qwen3", 2), layout=ParallelLayout(tensor=3))
