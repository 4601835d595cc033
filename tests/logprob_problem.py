"""Hidden states and a small vocabulary, and the log-probs that PyTorch computes of
them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed import ProcessGroup

from invrl.train.batches.micro_batch import MicroBatch
from invrl.train.model import logprobs
from invrl.train.model.logprobs import projected_logprobs
from invrl.train.runtime import device
from invrl.types.top_logprobs import NO_TOKEN

VOCABULARY = 43  # no multiple of a byte, of a block or of a number of ranks
HIDDEN = 16


def set_block_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(logprobs, "_BLOCK_TOKENS", tokens)
    monkeypatch.setattr(device, "logit_block_bytes", lambda: 0)


@dataclass(frozen=True, kw_only=True)
class Results:
    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    top_NK: torch.Tensor | None
    hidden_grad_UH: torch.Tensor
    weight_grad_VH: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    micro_batch: MicroBatch
    hidden_UH: torch.Tensor
    weight_VH: torch.Tensor
    grad_N: torch.Tensor
    softcap: float | None = None
    entropy_weight: float = 0.0
    """In the loss; 0: the entropies get no gradient."""

    @staticmethod
    def random(
        micro_batch: MicroBatch,
        dtype: torch.dtype = torch.float32,
        softcap: float | None = None,
        entropy_weight: float = 0.0,
    ) -> Problem:
        generator = torch.Generator().manual_seed(1)
        num_rows = len(micro_batch.project_U)
        return Problem(
            micro_batch=micro_batch,
            hidden_UH=torch.randn(num_rows, HIDDEN, generator=generator).to(dtype),
            weight_VH=torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype),
            grad_N=torch.randn(len(micro_batch.targets_N), generator=generator),
            softcap=softcap,
            entropy_weight=entropy_weight,
        )

    def loss(
        self,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        top_NK: torch.Tensor | None,
    ) -> torch.Tensor:
        losses_N = logprobs_N * self.grad_N
        if top_NK is not None:
            weight_K = torch.linspace(-1, 1, top_NK.shape[1], dtype=top_NK.dtype)
            known_NK = top_NK.masked_fill(top_NK == -torch.inf, 0.0)
            losses_N = losses_N + self.grad_N.roll(1) * (known_NK * weight_K).sum(1)
        if self.entropy_weight:
            losses_N = losses_N + self.entropy_weight * entropy_N * self.grad_N.flip(0)
        return losses_N.sum()

    def measured(self) -> Results:
        return self.shard(slice(None), None)

    def shard(self, vocabulary: slice, group: ProcessGroup | None) -> Results:
        """What one rank computes that has this slice of the vocabulary."""
        hidden_UH = self.hidden_UH.clone().requires_grad_()
        weight_VH = self.weight_VH[vocabulary].clone().requires_grad_()
        logprobs_N, entropy_N, top_NK = projected_logprobs(
            hidden_UH,
            weight_VH,
            self.micro_batch,
            start=vocabulary.start or 0,
            group=group,
            softcap=self.softcap,
        )
        self.loss(logprobs_N, entropy_N, top_NK).backward()
        assert hidden_UH.grad is not None
        assert weight_VH.grad is not None
        return Results(
            logprobs_N=logprobs_N.detach(),
            entropy_N=entropy_N.detach(),
            top_NK=None if top_NK is None else top_NK.detach(),
            hidden_grad_UH=hidden_UH.grad,
            weight_grad_VH=weight_VH.grad,
        )

    def exact(self) -> Results:
        """The formulas in float64, on all logits."""
        micro_batch = self.micro_batch
        hidden_UH = self.hidden_UH.double().requires_grad_()
        weight_VH = self.weight_VH.double().requires_grad_()
        logits_UV = hidden_UH @ weight_VH.T
        if self.softcap is not None:
            logits_UV = self.softcap * torch.tanh(logits_UV / self.softcap)
        removed_UV = torch.zeros(logits_UV.shape, dtype=torch.bool)
        if len(micro_batch.restricted_M):
            bits = np.unpackbits(
                micro_batch.allowed_MW, axis=1, count=VOCABULARY, bitorder="little"
            )
            removed_UV[torch.from_numpy(micro_batch.restricted_M)] = torch.from_numpy(
                bits == 0
            )
        temperature_U = torch.from_numpy(micro_batch.temperature_U).double()
        logits_UV = (
            logits_UV.masked_fill(removed_UV, -torch.inf) / temperature_U[:, None]
        )
        logprobs_NV = logits_UV.log_softmax(1)[
            torch.from_numpy(micro_batch.projection_N)
        ]
        logprobs_N = logprobs_NV.gather(
            1, torch.from_numpy(micro_batch.targets_N)[:, None]
        )[:, 0]
        probability_NV = logprobs_NV.exp()
        entropy_N = -(
            probability_NV * logprobs_NV.masked_fill(probability_NV == 0, 0)
        ).sum(1)
        top_NK = None
        if micro_batch.candidates_NK is not None:
            candidates_NK = torch.from_numpy(micro_batch.candidates_NK)
            top_NK = logprobs_NV.gather(1, candidates_NK.clamp(min=0))
            top_NK = top_NK.masked_fill(candidates_NK == NO_TOKEN, -torch.inf)
        self.loss(logprobs_N, entropy_N, top_NK).backward()
        assert hidden_UH.grad is not None
        assert weight_VH.grad is not None
        return Results(
            logprobs_N=logprobs_N.detach(),
            entropy_N=entropy_N.detach(),
            top_NK=None if top_NK is None else top_NK.detach(),
            hidden_grad_UH=hidden_UH.grad,
            weight_grad_VH=weight_VH.grad,
        )


def assert_equal(measured: Results, exact: Results, *, atol: float = 1e-5) -> None:
    for name in ("logprobs_N", "entropy_N", "hidden_grad_UH", "weight_grad_VH"):
        expected = getattr(exact, name)
        torch.testing.assert_close(
            getattr(measured, name).double(), expected, rtol=1e-6, atol=atol, msg=name
        )
    assert (measured.top_NK is None) == (exact.top_NK is None)
    if measured.top_NK is not None:
        torch.testing.assert_close(
            measured.top_NK.double(), exact.top_NK, rtol=1e-6, atol=atol
        )
