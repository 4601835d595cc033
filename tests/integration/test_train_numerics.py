"""Megatron against Hugging Face, same weights: log-probs, and the gradients of the
whole loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import CONFIGS, make_family_model
from rank_pool import RankPool
from safetensors.torch import load_file
from slow_cases import first_quick, named_quick
from tiny_model import CHAT_TEMPLATE, PAD_ID, make_tiny_model
from train_reference import Reference, random_batch, relative, worst
from transformers import AutoModelForCausalLM, AutoTokenizer

from invrl.algorithms.config import AlgorithmConfig
from invrl.gateway.rendering.chat_template import template_sources
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.types.metrics import resolve
from invrl.weights.tensors.tensor_spec import checksum

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(
    eps_clip_low=0.1, eps_clip_high=0.15, correction_cap=1.2, kl={"coefficient": 0.1}
)
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)


def prompts(seed: int) -> list[list[int]]:
    """Some share a beginning, one begins another, two are equal."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(10, 500, int(rng.integers(2, 30))).tolist() for _ in range(6)]
    return [
        *drawn,
        drawn[0] + drawn[1],
        drawn[0] + drawn[2],
        drawn[0][:2],
        drawn[3],
        drawn[0] + drawn[1],
    ]


@pytest.mark.parametrize("tied", first_quick([False, True]), ids=["untied", "tied"])
@pytest.mark.parametrize("family", CONFIGS)
def test_two_steps_of_each_family_equal_hugging_face(
    pool: RankPool, tmp_path: Path, family: str, tied: bool
) -> None:
    """Two optimizer steps of several micro-batches each, with everything in the loss:
    clip, correction, KL. The second step has ratios other than 1."""
    model = make_family_model(tmp_path / "model", family, tie_word_embeddings=tied)
    trainer = pool.build(model, train=EXACT, algorithm=ALGORITHM)

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, measured in zip(prompts(0), trainer.logprobs(prompts(0)), strict=True):
        with torch.no_grad():
            logprobs = hf(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert relative(measured, expected) < BOUND

    batch = random_batch(1)
    metrics = resolve(trainer.train(batch, steps=2))
    assert metrics["clip_fraction"] > 0.02
    assert metrics["correction_capped_fraction"] > 0.02
    assert metrics["kl_reference"] > 0
    assert metrics["micro_batches"] > 4
    initial, (first, second) = Reference(model), trainer.steps()
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        frozen = initial.frozen_logprobs(mini.samples)
        policy = Reference(model, first.weights) if at else initial
        expected = policy.gradients(mini, ALGORITHM, old=frozen, reference=frozen)
        gap, name = worst(step.gradients, expected)
        assert gap < BOUND, f"step {at}: {name}"


def test_engine_logprobs_as_old_equal_float64(pool: RankPool, tmp_path: Path) -> None:
    """Ratios are to the engine's log-probs already in the first step; nothing is left
    to correct."""
    model = make_tiny_model(tmp_path / "model")
    algorithm = AlgorithmConfig(old_logprobs="engine")
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    batch = random_batch(2)
    metrics = resolve(trainer.train(batch))
    assert metrics["clip_fraction"] > 0.1
    assert metrics["correction_mean"] == 1.0
    assert metrics["logprob_gap_max"] == 0.0
    engine = [
        torch.from_numpy(s.rollout_logprobs_T[s.loss_mask_T]).double()
        for s in batch.samples
    ]
    expected = Reference(model).gradients(batch, algorithm, old=engine, reference=None)
    gap, name = worst(trainer.steps()[0].gradients, expected)
    assert gap < BOUND, name


def test_old_logprobs_are_the_trainers_own_by_default(
    pool: RankPool, tmp_path: Path
) -> None:
    """In the one step of the default settings old is the current policy: every ratio is
    1, nothing is clipped, and the distance to the engine's log-probs is in the
    correction."""
    model = make_tiny_model(tmp_path / "model")
    trainer = pool.build(model, train=EXACT)
    batch = random_batch(2)
    metrics = resolve(trainer.train(batch))
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == 0.0
    assert metrics["approx_kl"] == 0.0
    assert metrics["correction_capped_fraction"] > 0.02
    expected = Reference(model).gradients(
        batch, AlgorithmConfig(), old=None, reference=None
    )
    gap, name = worst(trainer.steps()[0].gradients, expected)
    assert gap < BOUND, name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "scaling",
    first_quick([YARN, LLAMA3, {"rope_type": "linear", "factor": 3.0}]),
    ids=lambda scaling: scaling["rope_type"],
)
def test_scaled_rotary_positions_equal_hugging_face(
    pool: RankPool, tmp_path: Path, scaling: dict[str, Any]
) -> None:
    """They differ from plain ones in slow angles, so at far positions."""
    model = make_tiny_model(tmp_path / "model", family="llama", head_dim=32)
    ids = np.random.default_rng(0).integers(10, 500, 1500).tolist()

    def expected() -> torch.Tensor:
        hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            logprobs = hf(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    plain = expected()
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = scaling
    (model / "config.json").write_text(json.dumps(config))
    scaled = expected()
    assert relative(plain, scaled) > 100 * BOUND
    (measured,) = pool.build(model, train=EXACT).logprobs([ids])
    assert relative(measured, scaled) < BOUND


def test_embedding_of_the_padding_token_has_a_gradient(
    pool: RankPool, tmp_path: Path
) -> None:
    """An id is an id: a model that samples its padding token, or reads it, learns from
    it."""
    model = make_tiny_model(tmp_path / "model", tie_embeddings=False)
    trainer = pool.build(model, train=EXACT)
    batch = random_batch(3)
    for sample in batch.samples:
        sample.tokens_T[1] = PAD_ID
        sample.tokens_T[np.flatnonzero(sample.loss_mask_T)[:1]] = PAD_ID
    trainer.train(batch)
    (step,) = trainer.steps()
    expected = Reference(model).gradients(
        batch, AlgorithmConfig(), old=None, reference=None
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert np.abs(step.gradients[name][PAD_ID]).max() > 1e-4
        assert relative(step.gradients[name][PAD_ID], expected[name][PAD_ID]) < BOUND


@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))
@pytest.mark.parametrize("family", CONFIGS)
def test_exported_weights_equal_the_loaded_weights(
    pool: RankPool, tmp_path: Path, family: str, dtype: str
) -> None:
    """Byte for byte: the Hugging Face folder, and what engines are sent."""
    tied = family == "llama"
    model = make_family_model(
        tmp_path / "model", family, dtype=dtype, tie_word_embeddings=tied
    )
    trainer = pool.build(model, train=TrainConfig(train_dtype=dtype))  # type: ignore[arg-type]
    trainer.each("export", str(tmp_path / "exported"))
    source = load_file(model / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert {n: checksum(t) for n, t in exported.items()} == {
        n: checksum(t) for n, t in source.items()
    }
    assert {n: t.dtype for n, t in exported.items()} == {
        n: t.dtype for n, t in source.items()
    }
    (staged,) = trainer.each("staged", 1)
    assert staged == {name: checksum(tensor) for name, tensor in source.items()}
    _, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(info.values()), info


@pytest.mark.parametrize(
    "family", named_quick(CONFIGS.keys(), "gemma3_text", "glm4_moe")
)
def test_checkpoint_restores_weights_and_optimizer(
    pool: RankPool, tmp_path: Path, family: str
) -> None:
    """Weights and optimizer: the next step after loading is that of the trainer which
    saved."""
    model = make_family_model(tmp_path / "model", family)
    trainer = pool.build(model, train=EXACT)
    trainer.train(random_batch(1))
    trainer.each("save", str(tmp_path / "checkpoint"))
    saved = trainer.weights()
    trainer.train(random_batch(2))
    next_weights = trainer.weights()
    restored = pool.build(model, train=EXACT)
    restored.each("load", str(tmp_path / "checkpoint"))
    assert {
        name: checksum(torch.from_numpy(w)) for name, w in restored.weights().items()
    } == {name: checksum(torch.from_numpy(w)) for name, w in saved.items()}
    restored.train(random_batch(2))
    assert worst(restored.weights(), next_weights)[0] < 1e-6


def check_first_gradient(pool: RankPool, model: Path) -> None:
    """The first step's gradient is that of transformers."""
    trainer = pool.build(model, train=EXACT)
    batch = random_batch(1)
    trainer.train(batch)
    (step,) = trainer.steps()
    expected = Reference(model).gradients(
        batch, AlgorithmConfig(), old=None, reference=None
    )
    gap, name = worst(step.gradients, expected)
    assert gap < BOUND, name


@pytest.mark.parametrize("normalized", first_quick([True, False]))
def test_weights_of_the_chosen_experts_are_normalized_as_config_json_says(
    pool: RankPool, tmp_path: Path, normalized: bool
) -> None:
    """Divided by their sum or not, as config.json says."""
    model = make_family_model(
        tmp_path / "model", "qwen3_moe", norm_topk_prob=normalized
    )
    check_first_gradient(pool, model)


def test_latent_attention_without_a_query_projection_equals_hugging_face(
    pool: RankPool, tmp_path: Path
) -> None:
    """As Moonlight has it, whose experts are in no groups either."""
    model = make_family_model(
        tmp_path / "model",
        "deepseek_v3",
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rope_parameters=None,
    )
    check_first_gradient(pool, model)


@pytest.mark.parametrize("given", ["", "{{ messages[0].content }}"])
def test_saved_model_has_the_chat_template_it_was_trained_with(
    pool: RankPool, tmp_path: Path, given: str
) -> None:
    model = make_tiny_model(tmp_path / "model")
    pool.build(model, train=EXACT, chat_template=given).each(
        "export", str(tmp_path / "exported")
    )
    expected = given or CHAT_TEMPLATE
    assert template_sources(str(tmp_path / "exported")).tool_use == expected
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template == expected
    )
    assert template_sources(str(model)).tool_use == CHAT_TEMPLATE, (
        "the source is left alone"
    )


@pytest.mark.parametrize("share", first_quick([True, False]))
@pytest.mark.parametrize("max_tokens", first_quick([40, 4096]))
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_packed_samples_have_the_logprobs_of_each_sample_alone(
    pool: RankPool, tmp_path: Path, family: str, share: bool, max_tokens: int
) -> None:
    """Every way that a tree may be laid out, against one row at a time, without a
    window and with one."""
    model = make_family_model(tmp_path / "model", family, num_key_value_heads=1)
    trainer = pool.build(
        model,
        train=TrainConfig(
            train_dtype="float32",
            share_prefixes=share,
            max_tokens_per_micro_batch=max_tokens,
        ),
    )
    for seed in range(3):
        alone = [trainer.logprobs([ids])[0] for ids in prompts(seed)]
        for dense, chunk in (
            ((256, 1024), (0, 1024), (0, 3), (45, 4)) if share else ((256, 1024),)
        ):
            constants = {
                "batches.packing.DENSE_TREE_TOKENS": dense,
                "layers.sdpa.QUERY_CHUNK": chunk,
            }
            [replaced] = trainer.each("constants", constants)
            try:
                together = trainer.logprobs(prompts(seed))
            finally:
                trainer.each("constants", replaced)
            for one, other in zip(alone, together, strict=True):
                assert np.abs(one - other).max() < 2e-6 * max(
                    1.0, float(np.abs(one).max())
                )
