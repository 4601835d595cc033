"""Linear layers of attention and MLP that a tensor-parallel rank may have a part of.

Megatron's do their own differentiation, so that they can communicate meanwhile, and add
two more functions around it that communicate. Called from Python in both directions,
these take the host longer than the products themselves. A rank that has the layers
whole does not communicate: here torch computes the same products, in the same order of
operations. Imported after `device.prepare()`.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.nn.functional import linear


class ColumnLinear(ColumnParallelLinear):
    """Linear layer of which a rank has the weights of some outputs, or of all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_whole = self.output_size_per_partition == self.output_size

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias for the caller to add."""
        if not self._is_whole or weight is not None:
            return super().forward(input_, weight, runtime_gather_output)
        assert self.weight is not None
        return _outputs(input_, self.weight, self.bias, adds=not self.skip_bias_add)


class RowLinear(RowParallelLinear):
    """Linear layer of which a rank has the weights of some inputs, or of all."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_whole = self.input_size_per_partition == self.input_size

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the bias for the caller to add."""
        if not self._is_whole:
            return super().forward(input_)
        return _outputs(input_, self.weight, self.bias, adds=not self.skip_bias_add)


def _outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    adds: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = linear(hidden, weight)
    if bias is None or not adds:
        return output, bias
    # Not in one operation, which would round once less than with more ranks.
    return output + bias, None
