"""The experts of a layer, computed together by products in groups, not one after the other.

Megatron's own experts in groups need packages that the trainer does not have (TransformerEngine, grouped_gemm), and
keep the weights of all experts in one parameter. Imported after `device.prepare()`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from invrl.train.grouped_linear import grouped_linear


class Experts(SequentialMLP):
    """Computes the function of Megatron's `SequentialMLP`. Its parameters are the same, one weight per expert and
    projection, and so are its checkpoints."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Outputs [P, hidden], and no bias.

        `permuted_local_hidden_states`: [P, hidden], ordered by expert. `tokens_per_expert`: [E], on the CPU.
        `permuted_probs`: [P], the weight of each output, by which Megatron multiplies before the second projection.
        """
        ends_E = tokens_per_expert.cumsum(0, dtype=torch.int32).to(permuted_local_hidden_states.device)
        experts: list[Any] = list(self.local_experts)
        projected_PF = grouped_linear(
            permuted_local_hidden_states, ends_E, [expert.linear_fc1.weight for expert in experts]
        )
        gate_PF, up_PF = projected_PF.chunk(2, dim=-1)
        activated_PF = self.config.activation_func(gate_PF) * up_PF
        weighted_PF = (activated_PF * permuted_probs[:, None]).to(activated_PF.dtype)
        return grouped_linear(weighted_PF, ends_E, [expert.linear_fc2.weight for expert in experts]), None

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """In reverse order. Megatron's DDP lays parameters out in memory from the last to the first: those of the
        experts then lie in ascending order, at equal distances, and are multiplied without being copied."""
        yield from reversed(list(super().named_modules(*args, **kwargs)))
