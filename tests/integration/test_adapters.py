"""An adapter in one process against PEFT's formulas and PEFT itself: gradients, the
weights that engines get, the reference, checkpoints and PEFT folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_folders import Arrays, make_adapter, merged
from family_models import CONFIGS, make_family_model
from rank_pool import RankPool, Trainer
from safetensors.numpy import load_file
from slow_cases import first_quick, named_quick
from train_reference import (
    Reference,
    Tensors,
    check_same_bits,
    random_batch,
    relative,
    worst,
)

from invrl.algorithms.config import AlgorithmConfig
from invrl.cli.commands.export import _copy_model
from invrl.errors import ConfigError, TrainError
from invrl.train.config import TrainConfig
from invrl.types.metrics import resolve
from invrl.weights.tensors.tensor_spec import checksum

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(kl={"coefficient": 0.1})
BATCH = random_batch(1)
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DENSE_ONLY = ("q_proj", "v_proj", "down_proj")


def settings(*, dtype: str = "float32", **lora: object) -> TrainConfig:
    values: dict[str, Any] = {
        "train_dtype": dtype,
        "lr": 3e-3,
        "max_tokens_per_micro_batch": 41,
        "lora": {"rank": 4, "alpha": 8.0} | lora,
    }
    return TrainConfig.model_validate(values)


def merged_reference(model: Path, factors: Arrays, scale: float) -> Reference:
    weights = merged(model, factors, scale)
    changed = {name: weight for name, weight in weights.items() if "_proj" in name}
    return Reference(model, changed)


def expected_gradients(model: Path, factors: Arrays, scale: float) -> Tensors:
    """By the chain rule from the gradient G of each merged weight, in float64: scale B'G
    for A and scale G A' for B."""
    policy = merged_reference(model, factors, scale)
    frozen = Reference(model).frozen_logprobs(BATCH.samples)
    gradients = policy.gradients(BATCH, ALGORITHM, old=None, reference=frozen)
    expected: Tensors = {}
    for name in factors:
        module = name.partition(".lora_")[0]
        of_weight = gradients[f"{module}.weight"]
        a = torch.from_numpy(factors[f"{module}.lora_A.weight"]).double()
        b = torch.from_numpy(factors[f"{module}.lora_B.weight"]).double()
        is_a = ".lora_A" in name
        expected[name] = scale * (b.T @ of_weight if is_a else of_weight @ a.T)
    return expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "peft", model)


@pytest.mark.parametrize("rank", first_quick([4, 3]))
@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_of_both_factors_follow_from_those_of_the_merged_weights(
    pool: RankPool, tmp_path: Path, family: str, rank: int
) -> None:
    """Rank 3 has no grouped product: the experts are computed one after the other."""
    model = make_family_model(tmp_path / "model", family)
    start = make_adapter(tmp_path / "adapter", model, rank=rank)
    train = settings(rank=rank, path=str(start))
    trainer = pool.build(model, train=train, algorithm=ALGORITHM)
    factors = trainer.weights()
    numbers = resolve(trainer.train(BATCH))
    assert numbers["kl_reference"] > 0
    [step] = trainer.steps()
    expected = expected_gradients(model, factors, 8.0 / rank)
    gap, name = worst(step.gradients, expected)
    assert gap < BOUND, name


@pytest.mark.parametrize("family", named_quick(list(CONFIGS), "llama", "deepseek_v3"))
def test_gradients_equal_those_of_peft(
    pool: RankPool, tmp_path: Path, family: str
) -> None:
    """transformers has a layer's experts in one parameter, which PEFT does not adapt
    under these names."""
    peft = pytest.importorskip("peft")
    model = make_family_model(tmp_path / "model", family)
    start = make_adapter(tmp_path / "adapter", model, with_experts=False)
    train = settings(path=str(start), experts="none")
    trainer = pool.build(model, train=train, algorithm=ALGORITHM)
    trainer.train(BATCH)
    [step] = trainer.steps()

    policy = Reference(model)
    frozen = policy.frozen_logprobs(BATCH.samples)
    config = peft.LoraConfig.from_pretrained(start)
    config.inference_mode = False
    policy.model = peft.get_peft_model(policy.model, config)
    factors = load_file(start / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_" in name:
                factor = factors.pop(name.replace(".default", ""))
                parameter.copy_(torch.from_numpy(factor))
    assert not factors
    gradients = policy.gradients(BATCH, ALGORITHM, old=None, reference=frozen)
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): gradient
        for name, gradient in gradients.items()
    }
    gap, name = worst(step.gradients, expected)
    assert gap < BOUND, name


def test_log_probs_with_the_adapter_equal_those_of_the_merged_model(
    pool: RankPool, model: Path, adapter: Path
) -> None:
    trainer = pool.build(model, train=settings(path=str(adapter)))
    measured = trainer.token_logprobs(BATCH)
    policy = merged_reference(model, trainer.weights(), 2.0)
    for sample, logprobs_T, expected in zip(
        BATCH.samples, measured, policy.frozen_logprobs(BATCH.samples), strict=True
    ):
        if sample.loss_mask_T.any():
            assert relative(logprobs_T[sample.loss_mask_T], expected) < BOUND


@pytest.mark.parametrize("family", named_quick(list(CONFIGS), "llama", "qwen3_moe"))
def test_engines_get_the_merged_weights_and_the_base_stays(
    pool: RankPool, tmp_path: Path, family: str
) -> None:
    model = make_family_model(tmp_path / "model", family)
    start = make_adapter(tmp_path / "adapter", model)
    trainer = pool.build(model, train=settings(path=str(start)))
    base = trainer.each("base_checksums")[0]
    trainer.train(BATCH)
    assert trainer.each("base_checksums")[0] == base
    staged = trainer.each("staged", 1)[0]
    served = trainer.each("merged_weights")[0]
    expected = merged(model, trainer.weights(), 2.0)
    assert served.keys() == expected.keys()
    for name, weight in served.items():
        assert relative(weight, torch.from_numpy(expected[name])) < 1e-6, name
        assert checksum(torch.from_numpy(weight)) == staged[name], name


def test_an_untrained_adapter_changes_no_bit_of_the_weights(
    pool: RankPool, model: Path
) -> None:
    trainer = pool.build(model, train=settings())
    served = trainer.each("merged_weights")[0]
    check_same_bits(served, load_file(model / "model.safetensors"))


def test_only_the_factors_have_gradients_and_states(
    pool: RankPool, model: Path
) -> None:
    trainer = pool.build(model, train=settings(targets="q_proj,v_proj"))
    numbers = trainer.each("trained_numbers")[0]
    factors = sum(array.size for array in trainer.weights().values())
    assert numbers == {"parameters": factors, "optimizer": factors}


def test_targets_that_share_a_parameter_are_adapted_alone(
    pool: RankPool, tmp_path: Path, model: Path
) -> None:
    start = make_adapter(tmp_path / "adapter", model, targets=DENSE_ONLY)
    train = settings(path=str(start), targets=",".join(DENSE_ONLY))
    trainer = pool.build(model, train=train, algorithm=ALGORITHM)
    factors = trainer.weights()
    assert {name.split(".")[-3] for name in factors} == set(DENSE_ONLY)
    trainer.train(BATCH)
    gap, name = worst(
        trainer.steps()[0].gradients, expected_gradients(model, factors, 2.0)
    )
    assert gap < BOUND, name


def test_recomputed_layers_have_the_same_gradients(
    pool: RankPool, model: Path, adapter: Path
) -> None:
    steps = []
    for options in ({}, RECOMPUTED):
        trainer = pool.build(
            model,
            train=settings(path=str(adapter)),
            algorithm=ALGORITHM,
            megatron=options,
        )
        trainer.train(BATCH)
        steps.append(trainer.steps()[0])
    check_same_bits(steps[1].gradients, steps[0].gradients)


def test_dropout_follows_the_seed_and_is_off_without_gradient(
    pool: RankPool, model: Path, adapter: Path
) -> None:
    """Recomputed layers drop the same inputs again."""
    plain = pool.build(model, train=settings(path=str(adapter)))
    logprobs = plain.token_logprobs(BATCH)
    plain.train(BATCH)
    without = plain.steps()[0].gradients
    gradients = []
    for options in ({}, {}, RECOMPUTED):
        train = settings(path=str(adapter), dropout=0.5)
        trainer = pool.build(model, train=train, megatron=options)
        for found, expected in zip(
            trainer.token_logprobs(BATCH), logprobs, strict=True
        ):
            assert np.array_equal(found, expected)
        trainer.train(BATCH)
        gradients.append(trainer.steps()[0].gradients)
    check_same_bits(gradients[1], gradients[0])
    check_same_bits(gradients[2], gradients[0])
    assert worst(gradients[0], without)[0] > 0.1


# ----------------------------------------------------------------- on disk


def test_a_resumed_run_continues_bit_for_bit(
    pool: RankPool, tmp_path: Path, model: Path, adapter: Path
) -> None:
    train = settings(path=str(adapter), dropout=0.1)
    trainer = pool.build(model, train=train, algorithm=ALGORITHM)
    trainer.train(BATCH)
    trainer.each("save", str(tmp_path / "state"))
    trainer.train(random_batch(2))
    whole = trainer.steps()[-1]
    resumed = pool.build(model, train=train, algorithm=ALGORITHM)
    resumed.each("load", str(tmp_path / "state"))
    resumed.train(random_batch(2))
    [step] = resumed.steps()
    check_same_bits(step.gradients, whole.gradients)
    check_same_bits(step.weights, whole.weights)


def test_an_adapter_of_experts_alone_is_saved_and_loaded(
    pool: RankPool, tmp_path: Path
) -> None:
    """Megatron makes an optimizer without parameters for everything else."""
    model = make_family_model(tmp_path / "model", "qwen3_moe")
    train = settings(targets="gate_proj,up_proj,down_proj")
    trainer = pool.build(model, train=train)
    trainer.train(BATCH)
    trainer.each("save", str(tmp_path / "state"))
    trainer.train(random_batch(2))
    resumed = pool.build(model, train=train)
    resumed.each("load", str(tmp_path / "state"))
    resumed.train(random_batch(2))
    check_same_bits(resumed.weights(), trainer.weights())


def test_a_checkpoint_has_the_adapter_alone(
    pool: RankPool, tmp_path: Path, model: Path
) -> None:
    trainer = pool.build(model, train=settings())
    trainer.train(BATCH)
    trainer.each("save", str(tmp_path / "state"))
    factors = sum(array.nbytes for array in trainer.weights().values())
    saved = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    # a factor, its master weight and two moments; the base alone has 600 kB
    assert 3 * factors < saved < 4 * factors + 300_000


def test_a_checkpoint_of_another_adapter_or_base_is_refused(
    pool: RankPool, tmp_path: Path, model: Path
) -> None:
    state = str(tmp_path / "state")
    pool.build(model, train=settings()).each("save", state)
    other = make_family_model(tmp_path / "other", "llama", seed=1)
    for build, reason in (
        ({"model": other, "train": settings()}, "another base"),
        ({"model": model, "train": settings(alpha=4.0)}, "another alpha"),
        (
            {"model": model, "train": TrainConfig(train_dtype="float32")},
            "trains the whole model",
        ),
    ):
        trainer = pool.build(**build)
        with pytest.raises(TrainError, match=reason):
            trainer.each("load", state)


def test_peft_loads_the_exported_folder_with_equal_log_probs(
    pool: RankPool, tmp_path: Path, model: Path, adapter: Path
) -> None:
    peft = pytest.importorskip("peft")
    trainer = pool.build(model, train=settings(path=str(adapter)))
    trainer.train(BATCH)
    trainer.each("export", str(tmp_path / "peft"))
    policy = Reference(model)
    policy.model = peft.PeftModel.from_pretrained(policy.model, tmp_path / "peft")
    check_logprobs(trainer, policy)


@pytest.mark.parametrize("family", named_quick(list(CONFIGS), "llama", "glm4_moe"))
def test_the_exported_adapter_is_merged_into_a_model(
    pool: RankPool, tmp_path: Path, family: str
) -> None:
    """`invrl export` has the tensors that the engines had."""
    model = make_family_model(tmp_path / "model", family)
    start = make_adapter(tmp_path / "adapter", model)
    trainer = pool.build(model, train=settings(path=str(start)))
    trainer.train(BATCH)
    trainer.each("export", str(tmp_path / "peft"))
    served = trainer.each("merged_weights")[0]
    _copy_model(tmp_path / "peft", tmp_path / "whole", max_shard_bytes=1e9)
    check_same_bits(load_file(tmp_path / "whole" / "model.safetensors"), served)
    check_logprobs(trainer, Reference(tmp_path / "whole"))


def check_logprobs(trainer: Trainer, policy: Reference) -> None:
    for sample, logprobs_T, expected in zip(
        BATCH.samples,
        trainer.token_logprobs(BATCH),
        policy.frozen_logprobs(BATCH.samples),
        strict=True,
    ):
        if sample.loss_mask_T.any():
            assert relative(logprobs_T[sample.loss_mask_T], expected) < BOUND


def test_a_run_begins_with_the_adapter_that_another_has_exported(
    pool: RankPool, tmp_path: Path, model: Path
) -> None:
    trainer = pool.build(model, train=settings())
    trainer.train(BATCH)
    trainer.each("export", str(tmp_path / "peft"))
    weights = trainer.weights()
    started = pool.build(model, train=settings(path=str(tmp_path / "peft")))
    check_same_bits(started.weights(), weights)
    other = make_family_model(tmp_path / "other", "llama", seed=1)
    with pytest.raises(ConfigError, match="another model"):
        pool.build(other, train=settings(path=str(tmp_path / "peft")))


def test_the_exported_folder_names_its_base(
    pool: RankPool, tmp_path: Path, model: Path
) -> None:
    trainer = pool.build(model, train=settings(targets="q_proj,o_proj"))
    trainer.each("export", str(tmp_path / "peft"))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["o_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(model)
    base = json.loads((tmp_path / "peft" / "adapter_base.json").read_text())
    assert base["path"] == str(model)
    assert (tmp_path / "peft" / "tokenizer.json").exists()
