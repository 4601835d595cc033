"""The estimate of what a trainer rank needs of memory, by parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.train import device, logprobs, memory
from invrl.train.config import TrainConfig
from invrl.train.hf_config import read_hf_config
from invrl.train.memory import MemoryEstimate, estimate_memory
from invrl.train.model_size import ModelSize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", tie_embeddings=False)


def estimated(
    model: Path, *, on_cuda: bool = False, has_reference: bool = False, recompute: str = "", **train: object
) -> MemoryEstimate:
    return estimate_memory(
        TrainConfig.model_validate(train),
        model,
        has_reference=has_reference,
        served_dtype="bfloat16",
        megatron={"recompute-granularity": recompute} if recompute else {},
        on_cuda=on_cuda,
    )


def test_weights_gradients_and_optimizer_follow_from_the_parameters(model: Path) -> None:
    size = ModelSize.of(model, read_hf_config(model))
    half = estimated(model)
    assert half.weights == 2 * size.total
    assert half.gradients == 4 * size.total + 2 * 2 * size.vocabulary
    assert half.optimizer == 12 * size.total
    assert half.staging == 2 * 2 * size.total
    whole = estimated(model, train_dtype="float32")
    assert whole.weights == 4 * size.total
    assert whole.optimizer == 8 * size.total
    assert estimated(model, has_reference=True).weights == 2 * half.weights
    parts = (half.weights, half.gradients, half.optimizer, half.step, half.staging, half.process)
    assert half.total == pytest.approx(sum(parts))
    assert str(half).startswith(f"{half.total / 1e9:.2f} GB a rank (weights ")


def test_ranks_divide_what_they_share(model: Path) -> None:
    one = estimated(model)
    replicas = estimated(model, data_parallel_size=4)
    assert replicas.optimizer == one.optimizer / 4
    assert replicas.weights == one.weights
    assert estimated(model, data_parallel_size=4, use_distributed_optimizer=False).optimizer == one.optimizer
    tensor = estimated(model, tensor_model_parallel_size=2)
    assert tensor.weights == one.weights / 2
    assert tensor.optimizer == one.optimizer / 2
    assert tensor.step < one.step


def test_loading_a_checkpoint_counts_where_it_takes_more_than_a_step(model: Path) -> None:
    """Each of several replicas then holds the whole optimizer's state once."""
    one = estimated(model, max_tokens_per_microbatch=1)
    assert estimated(model, data_parallel_size=2, max_tokens_per_microbatch=1).step == one.optimizer
    assert one.step < one.optimizer


def test_a_step_follows_its_tokens(model: Path) -> None:
    steps = [estimated(model, max_tokens_per_microbatch=tokens).step for tokens in (1000, 2000, 4000)]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.01)
    assert steps[2] == pytest.approx(4 * steps[0], rel=0.3)  # a block of logits is bounded
    assert estimated(model, recompute="full").step < estimated(model).step
    assert estimated(model, recompute="selective").step == estimated(model).step


def test_a_gpu_stages_nothing_and_computes_attention_in_half(model: Path) -> None:
    assert estimated(model, on_cuda=True).staging == 0
    config = read_hf_config(model)
    assert memory.saved_bytes(config, 0, 2, on_cuda=True) < memory.saved_bytes(config, 0, 2, on_cuda=False)
    assert memory.saved_bytes(config, 0, 4, on_cuda=True) == memory.saved_bytes(config, 0, 4, on_cuda=False)


def test_what_is_written_twice_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate imports no torch, so it repeats what the trainer is built with."""
    assert memory._KEPT_LOGITS_BYTES == logprobs._KEPT_BYTES
    for name, on_cuda in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(device, "on_cuda", lambda on_cuda=on_cuda: on_cuda)
        assert memory._BLOCK_BYTES[name] == device.logit_block_bytes()
