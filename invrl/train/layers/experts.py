"""Experts of a layer, computed together by grouped products instead of one after the
other.

Megatron's own modules for this need packages that the trainer does without
(TransformerEngine, grouped_gemm). Imported after `device.prepare()`.
"""

from collections.abc import Generator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from invrl.train.layers.grouped_linear import grouped_linear, supports_num_rows


class Experts(SequentialMLP):
    """Computes the function of Megatron's `SequentialMLP`, with the same parameters for
    each expert, so checkpoints are the same."""

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [P, hidden], and no bias.

        `permuted_local_hidden_states` is [P, hidden], ordered by expert.
        `tokens_per_expert` is [E], on the CPU. `permuted_probs` is [P], the weights of
        the outputs, which multiply the input of the second projection, as in Megatron.
        """
        dtype = permuted_local_hidden_states.dtype
        if not all(supports_num_rows(length, dtype) for length in self._row_lengths):
            return super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
        sizes_E = tokens_per_expert.tolist()
        experts: list[Any] = list(self.local_experts)
        projected_PF = grouped_linear(
            permuted_local_hidden_states,
            sizes_E,
            [expert.linear_fc1.weight for expert in experts],
        )
        gate_PF, up_PF = projected_PF.chunk(2, dim=-1)
        activated_PF = self.config.activation_func(gate_PF) * up_PF
        weighted_PF = (activated_PF * permuted_probs[:, None]).to(activated_PF.dtype)
        return grouped_linear(
            weighted_PF, sizes_E, [expert.linear_fc2.weight for expert in experts]
        ), None

    @property
    def _row_lengths(self) -> tuple[int, int]:
        """Row lengths of the inputs of the two projections."""
        inner = self.config.moe_ffn_hidden_size
        assert inner is not None, "the model's description has it"
        return self.config.hidden_size, inner

    def named_modules(
        self, *args: Any, **kwargs: Any
    ) -> Generator[tuple[str, torch.nn.Module], None, None]:
        """Yield in reverse order. Megatron's distributed optimizer lays out parameters
        from the last to the first. So the experts' weights lie in ascending order at
        equal distances, and `grouped_linear` does not copy them."""
        yield from reversed(list(super().named_modules(*args, **kwargs)))
