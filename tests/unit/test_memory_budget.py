"""The estimate of what a trainer rank needs of memory, by parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from family_models import make_family_model
from safetensors.torch import load_file
from tiny_model import make_tiny_model

from invrl.families.hf_config import read_hf_config
from invrl.train.config import TrainConfig
from invrl.train.cost.activation_memory import LayerActivations, Recomputation
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.cost.memory_estimate import MemoryEstimate
from invrl.train.cost.model_size import ModelSize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model") / "qwen3", tie_embeddings=False
    )


def budget(
    model: Path,
    *,
    on_cuda: bool = False,
    frozen_models: int = 0,
    reference_moves: bool = False,
    reference_is_averaged: bool = False,
    has_critic: bool = False,
    compares_routers: bool = False,
    megatron: Mapping[str, object] | None = None,
    copies_checkpoints: bool = False,
    **train: object,
) -> MemoryBudget:
    return MemoryBudget.of(
        TrainConfig.model_validate(train),
        model,
        frozen_models=frozen_models,
        reference_moves=reference_moves,
        reference_is_averaged=reference_is_averaged,
        has_critic=has_critic,
        compares_routers=compares_routers,
        served_dtype="bfloat16",
        megatron=megatron or {},
        copies_checkpoints=copies_checkpoints,
        on_cuda=on_cuda,
    )


def estimated(model: Path, **settings: Any) -> MemoryEstimate:
    return budget(model, **settings).largest()


def test_bytes_of_weights_gradients_and_optimizer_follow_from_the_parameters(
    model: Path,
) -> None:
    size = ModelSize.of(model, read_hf_config(model))
    half = estimated(model)
    assert half.weights == 2 * size.total
    assert half.gradients == 4 * size.total + 2 * 2 * size.vocabulary
    assert half.optimizer == 12 * size.total
    assert half.staging == 2 * 2 * size.total
    whole = estimated(model, train_dtype="float32")
    assert whole.weights == 4 * size.total
    assert whole.optimizer == 8 * size.total
    assert estimated(model, frozen_models=1).weights == 2 * half.weights
    parts = (
        half.weights,
        half.gradients,
        half.optimizer,
        half.step,
        half.heap,
        half.staging,
        half.process,
    )
    assert half.copy == 0
    assert half.total == pytest.approx(sum(parts))
    assert str(half).startswith(f"{half.total / 1e9:.2f} GB a rank (weights ")


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_is_a_second_model_without_the_projection(
    tmp_path: Path, tied: bool
) -> None:
    """Whether the policy's projection is its own or the embedding, and however many
    stages there are."""
    folder = make_tiny_model(tmp_path / "model", tie_embeddings=tied)
    size = ModelSize.of(folder, read_hf_config(folder))
    of_critic = size.total - (0 if tied else size.vocabulary)
    alone = estimated(folder)
    both = estimated(folder, has_critic=True)
    assert both.weights - alone.weights == 2 * of_critic
    assert both.gradients - alone.gradients == 4 * of_critic
    assert both.optimizer - alone.optimizer == 12 * of_critic
    assert both.step == alone.step
    assert both.staging == alone.staging
    stages = zip(
        budget(folder, pipeline_model_parallel_size=2, has_critic=True).stages(),
        budget(folder, pipeline_model_parallel_size=2).stages(),
        strict=True,
    )
    assert (
        sum(with_critic.weights - without.weights for with_critic, without in stages)
        == 2 * of_critic
    )
    copies = budget(folder, copies_checkpoints=True).copy_bytes
    both_copies = budget(folder, copies_checkpoints=True, has_critic=True).copy_bytes
    assert both_copies - copies == (2 + 12) * of_critic


def test_ranks_divide_the_memory_of_shared_state(model: Path) -> None:
    one_rank = estimated(model)
    replicas = estimated(model, data_parallel_size=4)
    assert replicas.optimizer == one_rank.optimizer / 4
    assert replicas.weights == one_rank.weights
    assert (
        estimated(
            model, data_parallel_size=4, use_distributed_optimizer=False
        ).optimizer
        == one_rank.optimizer
    )
    tensor = estimated(model, tensor_model_parallel_size=2)
    assert tensor.weights == one_rank.weights / 2
    assert tensor.optimizer == one_rank.optimizer / 2
    assert tensor.step < one_rank.step


def test_only_expert_parallel_ranks_divide_the_experts(tmp_path: Path) -> None:
    model = make_family_model(tmp_path / "model", "glm4_moe", num_hidden_layers=3)
    sizes = {
        name: tensor.numel()
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    experts = 2 * 8 * 3 * 48 * 64  # layers, experts, their matrices
    rest = sum(sizes.values()) - experts
    assert estimated(model, data_parallel_size=4).optimizer == 12 * (rest + experts) / 4
    divided = estimated(
        model,
        tensor_model_parallel_size=2,
        data_parallel_size=2,
        expert_model_parallel_size=4,
    )
    assert divided.weights == 2 * (rest / 2 + experts / 4)
    assert divided.optimizer == 12 * (rest / 2 / 2 + experts / 4)
    halves = estimated(model, data_parallel_size=4, expert_model_parallel_size=2)
    assert halves.weights == 2 * (rest + experts / 2)
    assert halves.optimizer == 12 * (rest / 4 + experts / 2 / 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_grouped_expert_gradients_need_one_buffer_per_layer(
    tmp_path: Path, ranks: int
) -> None:
    """Of gate and up projection together. Here that is more than the gradient of the
    vocabulary's weight."""
    model = make_family_model(
        tmp_path / "model", "glm4_moe", num_hidden_layers=3, moe_intermediate_size=480
    )
    budgeted = estimated(model, data_parallel_size=2, expert_model_parallel_size=ranks)
    weights = budgeted.weights / 2
    assert budgeted.gradients == pytest.approx(
        4 * weights + 2 * 8 * (2 * 480) * 64 / ranks
    )


def test_context_ranks_divide_the_tokens_but_not_the_keys(model: Path) -> None:
    """A micro-batch then has as many tokens for each of them. (qwen3: two heads of
    keys, 16 wide.)"""
    one_rank = estimated(model, max_tokens_per_micro_batch=1000)
    context = estimated(model, max_tokens_per_micro_batch=1000, context_parallel_size=4)
    assert context.weights == one_rank.weights
    assert context.optimizer == one_rank.optimizer / 4
    more_keys = 4 * 2 * (2 * 16) * 3 * 1000
    layers_and_backward = 2 + 1
    assert context.step - one_rank.step == pytest.approx(
        more_keys * layers_and_backward
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_estimate_is_that_of_loading_a_checkpoint_if_larger_than_a_step(
    model: Path, ranks: int
) -> None:
    """The largest tensor is then there twice in float32, whether or not ranks share the
    optimizer's state."""
    size = ModelSize.of(model, read_hf_config(model))
    loading = estimated(model, data_parallel_size=ranks, max_tokens_per_micro_batch=1)
    assert loading.step == 2 * 4 * size.vocabulary
    assert loading.step < loading.optimizer


def test_offloaded_optimizer_counts_in_main_memory(model: Path) -> None:
    """Two buffers for gradients have at most the bytes of all of them."""
    size = ModelSize.of(model, read_hf_config(model))
    offloaded: dict[str, Any] = {"optimizer_cpu_offload": True, "on_cuda": True}
    plain = estimated(model, on_cuda=True)
    moved = budget(model, **offloaded)
    assert plain.optimizer == 12 * size.total
    assert moved.largest().optimizer == 0
    without_state = plain.total - plain.optimizer
    assert moved.largest().total == pytest.approx(without_state)
    assert moved.offloaded_bytes == (12 + 2 * 4) * size.total
    halves = budget(model, data_parallel_size=2, **offloaded)
    assert halves.offloaded_bytes == moved.offloaded_bytes
    stages = budget(model, pipeline_model_parallel_size=2, **offloaded)
    assert stages.offloaded_bytes == moved.offloaded_bytes
    on_cpu = estimated(model, train_dtype="float32", optimizer_cpu_offload=True)
    assert on_cpu.optimizer == moved.offloaded_bytes


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        ("bfloat16", 2),
        ("float32", 4),
    ],
)
def test_checkpoint_written_during_training_counts_on_the_ranks_that_write(
    model: Path, dtype: str, item: int
) -> None:
    """Weights, master weights and moments on each part's first rank; the model for
    Hugging Face on one."""
    number = ModelSize.of(model, read_hf_config(model)).total
    alone = budget(model, copies_checkpoints=True, train_dtype=dtype)
    assert alone.copy_bytes == (2 * item + 12) * number
    plain = estimated(model, train_dtype=dtype)
    assert alone.largest().copy == alone.copy_bytes
    assert alone.largest().total == plain.total + alone.copy_bytes
    halves = budget(
        model, copies_checkpoints=True, train_dtype=dtype, tensor_model_parallel_size=2
    )
    assert halves.largest().copy == (item + 12) * number / 2 + item * number
    assert halves.copy_bytes == alone.copy_bytes
    stages = budget(
        model,
        copies_checkpoints=True,
        train_dtype=dtype,
        pipeline_model_parallel_size=2,
    ).stages()
    assert sum(stage.copy for stage in stages) == alone.copy_bytes
    on_gpu = budget(model, copies_checkpoints=True, train_dtype=dtype, on_cuda=True)
    assert on_gpu.largest().copy == 0
    assert on_gpu.copy_bytes == alone.copy_bytes


def test_memory_of_loading_and_of_copying_a_checkpoint_is_not_added(
    model: Path,
) -> None:
    settings: dict[str, Any] = {"max_tokens_per_micro_batch": 1}
    alone = estimated(model, **settings)
    copying = estimated(model, copies_checkpoints=True, **settings)
    assert copying.copy > alone.step
    assert copying.step < alone.step


def test_memory_of_a_step_grows_with_its_tokens(model: Path) -> None:
    steps = [
        estimated(model, max_tokens_per_micro_batch=tokens).step
        for tokens in (1000, 2000, 4000)
    ]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.01)
    # a block of logits is bounded
    assert steps[2] == pytest.approx(4 * steps[0], rel=0.3)


def layer_of(**sizes: float) -> LayerActivations:
    fields = dict.fromkeys(
        (field.name for field in dataclasses.fields(LayerActivations)), 0.0
    )
    return LayerActivations(**fields | sizes)


@pytest.mark.parametrize(
    ("options", "kept", "backward"),
    [
        ({}, 100 + 100 + 100 + 200, 200),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform"},
            4 * 10,
            200 + 200,
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            },
            2 * 10,
            200 + 300,
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            3 * 10 + 200,
            200 + 100,
        ),
        ({"recompute_granularity": "selective"}, 500 - 4 * (30 - 5), 200),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp"},
            500 - 3 * 40,
            200,
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": "mlp, moe"},
            500 - 3 * 40 - 140,
            200,
        ),
        (
            {
                "recompute_granularity": "selective",
                "recompute_modules": "shared_experts",
            },
            500 - 20,
            200,
        ),
    ],
)
def test_recomputed_activations_are_not_counted(
    options: dict[str, object], kept: float, backward: float
) -> None:
    """Three layers of 100 bytes and one with experts of 200."""
    dense = layer_of(
        layer_input=10,
        core_attention=30,
        core_attention_recomputed=5,
        dense_mlp=40,
        rest=20,
    )
    experts = layer_of(
        layer_input=10,
        core_attention=30,
        core_attention_recomputed=5,
        shared_experts=20,
        routed_experts=120,
        rest=20,
    )
    assert dense.total == 100
    assert experts.total == 200
    chunk = [dense, dense, dense, experts]
    recomputation = Recomputation.of(options)
    assert recomputation.kept(chunk) == kept
    assert recomputation.backward(chunk) == backward


def test_recomputation_options_change_the_estimate(model: Path) -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    selective = {
        "recompute_granularity": "selective",
        "recompute_modules": "core_attn,mlp",
    }
    tokens = 100_000
    steps = [
        estimated(model, megatron=options, max_tokens_per_micro_batch=tokens).step
        for options in (full, selective, {})
    ]
    assert steps == sorted(steps)
    assert len(set(steps)) == 3


@pytest.mark.parametrize(
    ("placement", "kept", "in_pass"),
    [
        ("device", 1.0, 0.0),
        ("cpu", 0.0, 1.0),
        ("cpu_by_layer", 0.0, None),
    ],
)
def test_reference_counts_on_the_device_of_its_placement(
    model: Path, placement: str, kept: float, in_pass: float | None
) -> None:
    """On a GPU, where a micro-batch of one token adds next to nothing."""
    size = ModelSize.of(model, read_hf_config(model))
    settings: dict[str, Any] = {"on_cuda": True, "max_tokens_per_micro_batch": 1}
    without = estimated(model, **settings)
    placed = estimated(
        model, frozen_models=1, reference_placement=placement, **settings
    )
    assert placed.weights == without.weights + kept * 2 * size.total
    brought = 2 * size.total * in_pass if in_pass is not None else 0.0
    if in_pass is None:
        brought = 2 * (size.total - sum(size.by_layer) + max(size.by_layer))
    assert placed.step == pytest.approx(max(without.step, brought), rel=0.1)


def test_averaged_reference_counts_as_float32(model: Path) -> None:
    """Beside it a teacher stays in the dtype of the model. On a GPU it is in the memory
    of the CPU."""
    size = ModelSize.of(model, read_hf_config(model))
    averaged: dict[str, Any] = {"reference_moves": True, "reference_is_averaged": True}
    without = estimated(model)
    assert (
        estimated(model, frozen_models=1, **averaged).weights
        == without.weights + 4 * size.total
    )
    assert (
        estimated(model, frozen_models=2, **averaged).weights
        == without.weights + 6 * size.total
    )
    assert (
        estimated(model, frozen_models=1, reference_moves=True).weights
        == 2 * without.weights
    )
    on_gpu = estimated(
        model, frozen_models=1, on_cuda=True, reference_placement="cpu", **averaged
    )
    assert on_gpu.weights == estimated(model, on_cuda=True).weights
    copies: dict[str, Any] = {"frozen_models": 1, "copies_checkpoints": True}
    fixed = budget(model, **copies)
    moving = budget(model, **copies, **averaged)
    assert moving.largest().copy == fixed.largest().copy + 4 * size.total
    assert moving.copy_bytes == fixed.copy_bytes + 4 * size.total


def test_reference_by_layer_on_a_cpu_counts_in_the_dtype_of_its_files(
    tmp_path: Path,
) -> None:
    """The files are bfloat16, the training float32: half as much, and one layer at a
    time in float32."""
    folder = make_tiny_model(tmp_path / "model", dtype="bfloat16")
    size = ModelSize.of(folder, read_hf_config(folder))
    whole = estimated(folder, frozen_models=1, train_dtype="float32")
    by_layer = estimated(
        folder,
        frozen_models=1,
        train_dtype="float32",
        reference_placement="cpu_by_layer",
    )
    assert whole.weights == 2 * 4 * size.total
    assert by_layer.weights == (4 + 2) * size.total


def test_replayed_experts_count_a_column_per_layer(tmp_path: Path) -> None:
    """Four chosen experts: int16 in three layers, and twice int64 in the two layers
    that have experts."""
    model = make_family_model(tmp_path / "model", "glm4_moe", num_hidden_layers=3)
    tokens = 1000
    plain = estimated(model, max_tokens_per_micro_batch=tokens)
    replayed = estimated(
        model, max_tokens_per_micro_batch=tokens, routing_replay="engine"
    )
    assert replayed.step - plain.step == pytest.approx(tokens * 4 * (2 * 3 + 16 * 2))
    compared = estimated(
        model, max_tokens_per_micro_batch=tokens, compares_routers=True
    )
    assert compared.step - plain.step == pytest.approx(
        tokens * 4 * ((2 + 4) * 3 + 16 * 2)
    )


def test_memory_estimate_is_for_the_largest_micro_batch(model: Path) -> None:
    full = budget(model, max_tokens_per_micro_batch=4000)
    assert (
        full.largest(1000).total
        == estimated(model, max_tokens_per_micro_batch=1000).total
    )
    assert full.largest().total == full.largest(4000).total


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stages_divide_the_layers(tmp_path: Path, tied: bool) -> None:
    """The first has the embedding, the last the projection: of a tied one a copy."""
    folder = make_tiny_model(tmp_path / "model", layers=8, tie_embeddings=tied)
    size = ModelSize.of(folder, read_hf_config(folder))
    assert len(set(size.by_layer)) == 1
    layer = size.by_layer[0]
    norm = size.total - 8 * layer - size.vocabulary * (1 if tied else 2)
    stages = budget(folder, pipeline_model_parallel_size=4).stages()
    numbers = [2 * layer] * 4
    numbers[0] += size.vocabulary
    numbers[3] += size.vocabulary + norm
    assert [stage.weights for stage in stages] == [2 * number for number in numbers]
    vocabulary_gradients = [2 * size.vocabulary, 0, 0, 2 * size.vocabulary]
    for stage, number, of_vocabulary in zip(
        stages, numbers, vocabulary_gradients, strict=True
    ):
        assert stage.gradients == 4 * number + of_vocabulary
        assert stage.optimizer == 12 * number
    assert [stage.staging > 0 for stage in stages] == [True, False, False, False]


def test_pipeline_stage_keeps_activations_of_micro_batches_in_flight(
    tmp_path: Path,
) -> None:
    """Stage s of 4 has sent 4 - s on before the first comes back; with two chunks a
    stage, the first stage keeps 2 * 3 + 4 + 1 chunks of one layer."""
    folder = make_tiny_model(tmp_path / "model", layers=8)
    config = read_hf_config(folder)
    layer = LayerActivations.of(config, 0, 2, on_cuda=False).total
    tokens = 1000
    plain = budget(
        folder, pipeline_model_parallel_size=4, max_tokens_per_micro_batch=tokens
    ).stages()
    for stage, in_flight in enumerate((4, 3, 2)):
        assert plain[stage].step == pytest.approx(tokens * layer * (2 * in_flight + 1))
    virtual = budget(
        folder,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        max_tokens_per_micro_batch=tokens,
    )
    assert virtual.stages()[0].step == pytest.approx(
        tokens * layer * (2 * 3 + 4 + 1 + 1)
    )


def test_estimate_on_a_gpu_has_no_staging_and_half_precision_attention(
    model: Path,
) -> None:
    assert estimated(model, on_cuda=True).staging == 0
    assert estimated(model, on_cuda=True).heap == 0
    config = read_hf_config(model)
    half = [
        LayerActivations.of(config, 0, 2, on_cuda=on_cuda).total
        for on_cuda in (True, False)
    ]
    assert half[0] < half[1]
    whole = [
        LayerActivations.of(config, 0, 4, on_cuda=on_cuda).core_attention
        for on_cuda in (True, False)
    ]
    assert whole[0] == whole[1]


def test_estimate_on_a_gpu_counts_only_inputs_of_kernels(tmp_path: Path) -> None:
    hidden = 64
    heads = 4
    kv_heads = 2
    dim = 16
    inner = 96
    folder = make_tiny_model(
        tmp_path / "model",
        family="qwen3",
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate=inner,
    )
    # of each its input and its result, which is the next projection's input
    norms = 2 * (2 * hidden)
    mixed = (heads + 2 * kv_heads) * dim
    attention = (2 * heads + 2 * kv_heads) * dim  # queries, keys, values and the output
    mlp = 2 * inner + inner  # gate and up, and what they give
    numbers = hidden + norms + mixed + attention + mlp  # and the layer's input
    in_float32 = 2 + heads  # the norms' rows, and the logarithms of attention's sums
    activation_bytes = LayerActivations.of(
        read_hf_config(folder), 0, 2, on_cuda=True
    ).total
    assert activation_bytes == 2 * numbers + 4 * in_float32
