"""Megatron's router of experts with a bias that stays float32 in a model of any dtype.

Megatron converts the whole model to bfloat16 and makes the bias float32 again at its first use: by then it is
rounded, and what is exported is not what was loaded. Imported after `device.prepare()`.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


class ExpertRouter(TopKRouter):
    """Chooses experts as Megatron does."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """torch's hook for every conversion of a module (`to`, `bfloat16`, ...)."""
        bias = self.expert_bias
        module = super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return module
