"""A training step computed by other means: the Hugging Face model in float64, one row
at a time, the loss written out from the papers, autograd for the gradient. Knows
neither packing nor Megatron nor `invrl.algorithms`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from invrl.algorithms.config import AlgorithmConfig
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

Arrays = dict[str, NDArray[np.float32]]
Tensors = dict[str, torch.Tensor]


class Reference:
    """The model of a folder in float64."""

    def __init__(self, path: Path, weights: Arrays | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        # it would take the padding's row out of the gradient
        self.model.get_input_embeddings().padding_idx = None
        parts = {
            part_name: part
            for name, parameter in self.model.named_parameters()
            for part_name, part in _saved_parts(name, parameter.data)
        }
        for name, weight in (weights or {}).items():
            parts[name].copy_(torch.from_numpy(weight))

    def logprobs(self, sample: TrainSample) -> torch.Tensor:
        """Of the trained tokens [N], under the sample's temperature; with gradient."""
        tokens_T = torch.from_numpy(sample.tokens_T.astype(np.int64))
        logprobs_TV = self.distributions(tokens_T, sample.temperature)
        picked_T = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
        return picked_T[torch.from_numpy(sample.loss_mask_T[1:])]

    def distributions(self, tokens_T: torch.Tensor, temperature: float) -> torch.Tensor:
        """Log-probs [T-1, vocabulary] of what comes after each token but the last; with
        gradient."""
        with float64_everywhere():
            logits_TV = self.model(tokens_T[None]).logits[0, :-1] / temperature
        return logits_TV.log_softmax(-1)

    def frozen_logprobs(self, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.logprobs(sample) for sample in samples]

    def gradients(
        self,
        batch: TrainBatch,
        algorithm: AlgorithmConfig,
        *,
        old: Sequence[torch.Tensor] | None,
        reference: Sequence[torch.Tensor] | None,
    ) -> Tensors:
        """Of GRPO's loss over the whole mini-batch; `old` None: the current policy
        itself."""
        self.model.zero_grad()
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in batch.samples)
        for at, (sample, advantages_T) in enumerate(
            zip(batch.samples, batch.advantages, strict=True)
        ):
            if not sample.loss_mask_T.any():
                continue
            current = self.logprobs(sample)
            before = current.detach() if old is None else old[at]
            sampled = torch.from_numpy(
                sample.rollout_logprobs_T[sample.loss_mask_T]
            ).double()
            advantage = torch.from_numpy(advantages_T[sample.loss_mask_T]).double()
            ratio = torch.exp(current - before)
            low = 1 - algorithm.eps_clip_low
            high = 1 + algorithm.eps_clip_high
            policy_loss = torch.min(
                ratio * advantage, torch.clip(ratio, low, high) * advantage
            )
            if algorithm.dual_clip:
                policy_loss = torch.where(
                    advantage < 0,
                    torch.max(policy_loss, algorithm.dual_clip * advantage),
                    policy_loss,
                )
            weight = torch.ones_like(before)
            if algorithm.correction == "truncated":
                weight = torch.clip(
                    torch.exp(before - sampled), max=algorithm.correction_cap
                )
            loss = -(weight * policy_loss).sum()
            if algorithm.kl is not None:
                assert reference is not None
                gap = reference[at] - current
                divergence = torch.exp(gap) - gap - 1
                if algorithm.kl.clamp:
                    divergence = torch.clip(divergence, max=algorithm.kl.clamp)
                loss = loss + algorithm.kl.coefficient * divergence.sum()
            (loss / tokens).backward()
        return self._collected()

    def gradients_of(self, loss: torch.Tensor) -> Tensors:
        """Of a loss that was computed with this model."""
        self.model.zero_grad()
        loss.backward()
        return self._collected()

    def _collected(self) -> Tensors:
        return {
            part_name: part
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
            for part_name, part in _saved_parts(name, parameter.grad)
        }


def _saved_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that transformers saves of a parameter, as views: it joins a layer's
    experts in memory."""
    experts, _, last_name = name.rpartition(".")
    if not experts.endswith(".experts"):
        yield name, tensor
        return
    for expert, rows in enumerate(tensor):
        if last_name == "gate_up_proj":
            gate, up = rows.chunk(2)
            yield f"{experts}.{expert}.gate_proj.weight", gate
            yield f"{experts}.{expert}.up_proj.weight", up
        else:
            yield f"{experts}.{expert}.{last_name}.weight", rows


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """transformers computes norms, angles, attention's softmax and routers in float32,
    whatever the weights are. Here what asks for float32 gets float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def relative(
    measured: NDArray[np.float32] | torch.Tensor,
    expected: NDArray[np.float32] | torch.Tensor,
) -> float:
    """Norm of the difference over norm of what is expected."""
    a, b = (torch.as_tensor(x).double() for x in (measured, expected))
    assert a.shape == b.shape
    if not b.any():  # an expert that no token chose
        assert not a.any()
        return 0.0
    return float((a - b).norm() / b.norm())


def worst(measured: Arrays, expected: Arrays | Tensors) -> tuple[float, str]:
    """Return the largest relative difference of a tensor, and its name."""
    assert measured.keys() == expected.keys()
    return max((relative(measured[name], expected[name]), name) for name in expected)


def check_same_bits(measured: Arrays, expected: Arrays) -> None:
    assert measured.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(measured[name], expected[name]), name


# ----------------------------------------------------------------- batches


def random_batch(
    seed: int,
    *,
    groups: int = 4,
    rollouts: int = 3,
    prompt: int = 12,
    answer: int = 8,
    temperature: float = 0.8,
    vocab: int = 512,
) -> TrainBatch:
    """Groups that share a prompt, with everything that is awkward: a rollout of two
    branches, rows that are equal, a row that begins another, a row without a trained
    token, lengths of all kinds."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []

    def add(
        tokens: NDArray[np.int64], mask: NDArray[np.bool_], group: int, rollout: int
    ) -> None:
        # Near what a random model of this vocabulary gives, and far enough for the cap
        # to cut some.
        noise = rng.normal(-np.log(vocab), 1.5, len(tokens))
        samples.append(
            TrainSample(
                tokens_T=tokens.astype(np.int32),
                loss_mask_T=mask,
                rollout_logprobs_T=np.where(mask, noise, 0).astype(np.float32),
                versions_T=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                temperature=temperature,
                group_id=f"g{group}",
                rollout_id=f"g{group}r{rollout}",
                attempt=0,
                turn_ids=("t",),
            )
        )

    for group in range(groups):
        length = prompt + int(rng.integers(0, 5))
        shared = rng.integers(10, vocab, length)
        for rollout in range(rollouts):
            own = rng.integers(10, vocab, int(rng.integers(2, answer + 1)))
            tokens = np.concatenate([shared, own])
            mask = np.arange(len(tokens)) >= length
            add(tokens, mask, group, rollout)
            if (
                rollout == 0
            ):  # a second branch from the middle of the first; only its tail is trained
                tail = rng.integers(10, vocab, 4)
                branch = np.concatenate([tokens[: length + 1], tail])
                add(branch, np.arange(len(branch)) > length, group, rollout)
        if group == 0:
            add(tokens, mask, group, rollouts)  # equal to the last
            add(tokens[:-1], mask[:-1], group, rollouts + 1)  # begins it
            add(tokens, np.zeros_like(mask), group, rollouts + 2)  # trains nothing
    advantages = tuple(
        np.where(s.loss_mask_T, rng.normal(0, 1.5), 0).astype(np.float32)
        for s in samples
    )
    return TrainBatch(
        batch_id=seed,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=advantages,
    )


def rewarded_batch(seed: int) -> TrainBatch:
    """Rewards of single tokens, some of them where nothing is trained, which count for
    nothing."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for sample in batch.samples:
        rewards_T = rng.normal(size=len(sample.tokens_T)) * (
            rng.random(len(sample.tokens_T)) < 0.4
        )
        samples.append(
            replace(sample, columns={"rewards": rewards_T.astype(np.float32)})
        )
    return replace(batch, samples=tuple(samples))
