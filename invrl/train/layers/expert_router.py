"""Megatron's router of experts, with a bias that stays float32 in a model of any dtype,
and a count of its choices.

Megatron converts the whole model to bfloat16 and makes the bias float32 again at its
first use: by then it is rounded, and the exported bias differs from the loaded one.
Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from invrl.train.layers.routing_replay import LayerRouting
from invrl.train.runtime import device


class ExpertRouter(TopKRouter):
    """Chooses experts like Megatron.

    Inside `counting` it adds up, over tokens, how often it chose each expert, and the
    entropy of its scores.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows_P: torch.Tensor | None = None
        self.tally = self._no_tally()
        """[experts + 1] float64, since the last `clear`: the rows' tokens that each
        expert computes, then the sum of their entropies in nats."""

    def clear(self) -> None:
        self.tally = self._no_tally()

    def _no_tally(self) -> torch.Tensor:
        num_experts = self.config.num_moe_experts
        assert num_experts is not None, "only layers with experts have routers"
        return torch.zeros(num_experts + 1, dtype=torch.float64, device=device.device())

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts' weights and a mask of them, [P, experts], from
        `logits` [P, 1, experts]."""
        weights_PE, chosen_PE = super().routing(logits, padding_mask)
        if isinstance(self.router_replay, LayerRouting):
            self.router_replay.note(logits.detach().flatten(0, 1), self.score_function)
        if self._rows_P is not None:
            with torch.no_grad():
                self._count(logits.flatten(0, 1), chosen_PE, self._rows_P.double())
        return weights_PE, chosen_PE

    def _count(
        self,
        logits_PE: torch.Tensor,
        chosen_PE: torch.Tensor,
        sequences_P: torch.Tensor,
    ) -> None:
        if self.score_function == "sigmoid":
            scores_PE = logits_PE.float().sigmoid()
            shares_PE = scores_PE / scores_PE.sum(-1, keepdim=True)
        else:
            shares_PE = logits_PE.float().softmax(-1)
        entropy_P = torch.special.entr(shares_PE).sum(-1).double()
        self.tally[:-1] += sequences_P @ chosen_PE.double()
        self.tally[-1] += sequences_P @ entropy_P

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> Any:
        """Override torch's hook for every conversion of a module (`to`, `bfloat16`,
        ...)."""
        bias = self.expert_bias
        module = super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return module


def expert_routers(model: torch.nn.Module) -> list[ExpertRouter]:
    return [module for module in model.modules() if isinstance(module, ExpertRouter)]


@contextmanager
def counting(
    routers: Sequence[ExpertRouter], sequences_P: torch.Tensor
) -> Iterator[None]:
    """Let the routers count within the block: each token once for each row that has it,
    so that the sum depends neither on how rows were packed nor on how ranks divide
    them.

    `sequences_P` is of the tokens that this rank routes. Repetitions by activation
    recomputation in the backward pass are outside of the block.
    """
    for router in routers:
        router._rows_P = sequences_P
    try:
        yield
    finally:
        for router in routers:
            router._rows_P = None
