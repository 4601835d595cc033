"""The experts of a model: products in groups against one product for each expert, and a
training step against the same step with Megatron's module and against Hugging Face's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_models import make_family_model
from transformers import AutoModelForCausalLM

from benchmarks.training.hugging_face_step import HuggingFaceStep, pad_batch
from benchmarks.training.step_program import measure_steps, start_rank
from benchmarks.training.workloads import make_batch
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.algorithms.config import AlgorithmConfig
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.cost.model_size import ComputeCost
from invrl.train.layers.grouped_linear import grouped_linear
from invrl.train.runtime import device
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.metrics import resolve

_MICRO_BATCH = 16_384
_SMOKE_MICRO_BATCH = 256
_ROUNDING = 2.0**-8
"""Of a number in bfloat16, relative."""
_ROUNDS = 5
_ALGORITHM = AlgorithmConfig.model_validate({})


def run(settings: CheckSettings) -> None:
    device.prepare()
    _check_products(settings)
    _check_step(settings)


def _check_products(settings: CheckSettings) -> None:
    """Products and gradients against one product for each expert, and how long both
    take: the experts of a layer of Qwen3-30B-A3B, 16,384 tokens that go to 8 of them
    each, every eighth expert without tokens."""
    experts, inputs, outputs, rows = (
        (8, 64, 48, 300) if settings.smoke else (128, 2048, 1536, 131072)
    )
    memory = torch.randn(experts, outputs, inputs, device=device.device()) / inputs**0.5
    adjacent = [weight.detach().requires_grad_() for weight in memory.bfloat16()]
    separate = [weight.detach().clone().requires_grad_() for weight in adjacent]
    share_E = np.random.default_rng(0).dirichlet(np.full(experts, 2.0)) * (
        np.arange(experts) % 8 > 0
    )
    sizes = np.floor(share_E / share_E.sum() * rows).astype(int).tolist()
    sizes[-1] += rows - sum(sizes)
    rows_PI = (
        torch.randn(rows, inputs, device=device.device()).bfloat16().requires_grad_()
    )
    gradient_PO = torch.randn(rows, outputs, device=device.device()).bfloat16()

    def one_by_one() -> torch.Tensor:
        parts = zip(rows_PI.split(sizes), separate, strict=True)
        return torch.cat(
            [torch.nn.functional.linear(part, weight) for part, weight in parts]
        )

    ways: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "one_by_one": (one_by_one, separate),
        "adjacent": (lambda: grouped_linear(rows_PI, sizes, adjacent), adjacent),
        "separate": (lambda: grouped_linear(rows_PI, sizes, separate), separate),
    }
    results: dict[str, list[torch.Tensor]] = {}
    for name, (forward, weights) in ways.items():
        outputs_PO = forward()
        gradients = torch.autograd.grad(outputs_PO, [rows_PI, *weights], gradient_PO)
        results[name] = [outputs_PO.detach(), gradients[0], torch.stack(gradients[1:])]
    expected = results.pop("one_by_one")
    for name, found in results.items():
        for part, found_part, expected_part in zip(
            ("outputs", "row gradients", "weight gradients"),
            found,
            expected,
            strict=True,
        ):
            gap = _relative_gap(found_part, expected_part)
            emit(check="products", way=name, part=part, gap=gap)
            assert gap < _ROUNDING, f"{name}: {part} are off by {gap}"
        empty = [number for number, size in enumerate(sizes) if size == 0]
        assert empty
        assert not found[2][empty].any(), (
            f"{name}: an expert without tokens has a gradient"
        )

    work = 2.0 * rows * inputs * outputs
    for name, (forward, weights) in ways.items():
        outputs_PO = forward()
        forward_s = _seconds(forward)
        backward_s = _seconds(
            lambda outputs_PO=outputs_PO, weights=weights: torch.autograd.grad(
                outputs_PO, [rows_PI, *weights], gradient_PO, retain_graph=True
            )
        )
        emit(
            check="products",
            way=name,
            forward_s=forward_s,
            backward_s=backward_s,
            forward_tflops=work / forward_s / 1e12,
            backward_tflops=2 * work / backward_s / 1e12,
        )


def _model(settings: CheckSettings) -> Path:
    """Qwen3 with experts, random weights."""
    folder = settings.work / "models" / "experts"
    shape: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "max_position_embeddings": 8192,
    }
    if settings.smoke:
        shape = {"num_experts": 8, "moe_intermediate_size": 32}
    # Without a padding id: Hugging Face leaves the gradient of its embedding out.
    shape |= {"initializer_range": 0.02, "mlp_only_layers": [], "pad_token_id": None}
    if not (folder / "tokenizer.json").exists():  # written last
        make_family_model(folder, "qwen3_moe", dtype="bfloat16", **shape)
    return folder


def _check_step(settings: CheckSettings) -> None:
    """One batch: log-probs, gradients, and tokens per second, with experts together and
    one by one."""
    folder = _model(settings)
    micro_batch = _SMOKE_MICRO_BATCH if settings.smoke else _MICRO_BATCH
    train = TrainConfig.model_validate(
        {
            "train_dtype": "bfloat16",
            "max_tokens_per_micro_batch": micro_batch,
            "lr": 1e-12,  # so that every step has the same weights
            "clip_grad": None,
        }
    )
    rank = start_rank(str(folder), train, _ALGORITHM)
    batch = make_batch(
        "equal_lengths",
        num_tokens=4 * micro_batch,
        longest=micro_batch // 4,
        vocab_size=512,
    )
    prompts = [sample.tokens_T[:1000].tolist() for sample in batch.samples[:3]]
    [shard] = shard_batch(batch, ranks=1, steps=1)

    def together() -> float:
        return resolve(rank.train(shard).metrics)["grad_norm"]

    def one_by_one() -> float:
        with _sequential_experts():
            return together()

    logprobs = {"together": rank.logprobs(prompts)}
    with _sequential_experts():
        logprobs["one_by_one"] = rank.logprobs(prompts)
    for dtype in (torch.bfloat16, torch.float32):
        logprobs[str(dtype)] = _hugging_face_logprobs(folder, prompts, dtype)
    gaps = {
        name: _mean_gap(values, logprobs["torch.float32"])
        for name, values in logprobs.items()
    }
    emit(check="logprobs", mean_gap_to_float32=gaps)

    norms = {"together": together()}
    gradients = _expert_gradients(rank)
    norms["one_by_one"] = one_by_one()
    expected = _expert_gradients(rank)
    gradient_gaps = {
        name: _relative_gap(gradients[name], expected[name]) for name in expected
    }
    worst = max(gradient_gaps, key=lambda name: gradient_gaps[name])
    plain = HuggingFaceStep(str(folder), train, _ALGORITHM)
    padded = pad_batch(batch, tokens=micro_batch, sorted_by_length=False)
    norms["hugging_face"] = plain.run(padded)
    emit(check="gradients", norms=norms, worst_expert=worst, gap=gradient_gaps[worst])

    steps = {
        "together": together,
        "one_by_one": one_by_one,
        "hugging_face": lambda: plain.run(padded),
    }
    cost = ComputeCost.of_model(folder)
    tokens = sum(len(sample.tokens_T) for sample in batch.samples)
    operations = sum(
        3
        * (
            cost.tokens(0, len(sample.tokens_T) - 1)
            + cost.projection * int(sample.loss_mask_T.sum())
        )
        for sample in batch.samples
    )
    for name, step in steps.items():
        if device.on_cuda():
            torch.cuda.reset_peak_memory_stats()
        [speeds] = measure_steps({name: step}, batch, 2).values()
        emit(
            check="speed",
            way=name,
            tokens_per_s=speeds,
            tflops=[speed * operations / tokens / 1e12 for speed in speeds],
            peak_gb=device.peak_memory() / 1e9,
        )
    # Last, so that a wrong result costs no measurement.
    assert 0.0 < gaps["together"] < 2.0 * gaps["torch.bfloat16"]
    assert abs(norms["together"] / norms["one_by_one"] - 1) < 0.02
    assert abs(norms["together"] / norms["hugging_face"] - 1) < 0.05


@contextmanager
def _sequential_experts() -> Iterator[None]:
    """Within the block layers compute their experts by Megatron's own module."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from invrl.train.layers.experts import Experts

    forward = Experts.forward
    Experts.forward = SequentialMLP.forward  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Experts.forward = forward


def _hugging_face_logprobs(
    folder: Path, prompts: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[np.ndarray]:
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    model = model.to(device.device()).eval()
    logprobs: list[np.ndarray] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=device.device())
        with torch.no_grad():
            logprobs_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(logprobs_TV.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy())
    return logprobs


def _mean_gap(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(found) - np.concatenate(expected)).mean())


def _relative_gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of `expected`."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _expert_gradients(rank: TrainRank) -> dict[str, torch.Tensor]:
    """What the last step accumulated in the second layer, by the parameters' names."""
    [chunk] = rank._step.chunks
    parameters: dict[str, Any] = dict(chunk.named_parameters())
    return {
        name: parameter.main_grad.clone()
        for name, parameter in parameters.items()
        if "layers.1." in name
        and ".local_experts." in name
        and parameter.main_grad.any()
    }


def _seconds(work: Callable[[], object]) -> float:
    """Of one call, after a warm-up."""
    work()
    started = _finished()
    for _ in range(_ROUNDS):
        work()
    return (_finished() - started) / _ROUNDS


def _finished() -> float:
    """The time when the device has done its work."""
    if device.on_cuda():
        torch.cuda.synchronize()
    return time.monotonic()
