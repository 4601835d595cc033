"""RMS norm as a module of Megatron's local layer spec, instead of its
`WrappedTorchNorm`.

Megatron's wrapper refuses sequence parallelism and weights centred at zero. Imported
after `device.prepare()`.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import rms_norm

from invrl.train.runtime import device


class RmsNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; weight is 1 + the parameter if the
    configuration centres it at zero. That form is computed in float32, as in
    transformers."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self._eps = eps
        self._is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype)
        )
        # Megatron sums the gradient over the ranks, each of which normalises its part
        # of the row.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _normed_in_one_kernel(
            hidden, self.weight, eps=self._eps, is_zero_centered=self._is_zero_centered
        )


def normed(
    hidden: torch.Tensor, weight: torch.Tensor, *, eps: float, is_zero_centered: bool
) -> torch.Tensor:
    """Apply `RmsNorm` over the last dimension."""
    if is_zero_centered:
        scale = 1.0 + weight.float()
        return rms_norm(hidden.float(), weight.shape, scale, eps).type_as(hidden)
    return rms_norm(hidden, weight.shape, weight, eps)


_normed_in_one_kernel = device.fused_by_row(normed)
