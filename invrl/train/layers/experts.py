"""Experts of a layer, computed together by grouped products instead of one after the
other.

Megatron's own modules for this need packages that the trainer does without
(TransformerEngine, grouped_gemm). Imported after `device.prepare()`.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from invrl.train.layers.grouped_linear import grouped_linear, supports_num_rows

ExpertsAddition = Callable[[torch.Tensor, Sequence[int]], torch.Tensor | None]
"""Returns what is added to the outputs of a projection of all experts, given its inputs
[P, .], ordered by expert, and the number of rows of each; None: nothing."""


class Experts(SequentialMLP):
    """Computes the function of Megatron's `SequentialMLP`, with the same parameters for
    each expert, so checkpoints are the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.additions: dict[str, ExpertsAddition] = {}
        """Outputs of adapters by the name of the projection; empty without."""
        self.one_by_one = False
        """Whether adapters need Megatron's way, one expert after the other."""

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
        is_grouped = all(
            supports_num_rows(length, dtype) for length in self._row_lengths
        )
        if self.one_by_one or not is_grouped:
            return super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
        sizes_E = tokens_per_expert.tolist()
        projected_PF = self._projected(
            "linear_fc1", permuted_local_hidden_states, sizes_E
        )
        gate_PF, up_PF = projected_PF.chunk(2, dim=-1)
        activated_PF = self.config.activation_func(gate_PF) * up_PF
        weighted_PF = (activated_PF * permuted_probs[:, None]).to(activated_PF.dtype)
        return self._projected("linear_fc2", weighted_PF, sizes_E), None

    def _projected(
        self, name: str, rows_PI: torch.Tensor, sizes_E: Sequence[int]
    ) -> torch.Tensor:
        """Return the outputs of this projection of all experts."""
        weights = [getattr(expert, name).weight for expert in self.local_experts]
        output_PO = grouped_linear(rows_PI, sizes_E, weights)
        addition = self.additions.get(name)
        added_PO = None if addition is None else addition(rows_PI, sizes_E)
        return output_PO if added_PO is None else output_PO + added_PO

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
