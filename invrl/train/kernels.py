"""Which implementations compute a trainer's attention, norms and optimizer on a machine.

`device.py` chooses the attention, Megatron the optimizer when it is imported. This file says which those will
be, without importing torch or Megatron.
"""

import importlib.util
from dataclasses import dataclass

SMALLEST_FLEX_HEAD = 16
"""Fewest dimensions of a head that torch's FlexAttention has a kernel for."""
FLEX_TILE = 128
"""Queries and keys of one tile of FlexAttention's mask."""
_FUSED_ADAM = {"transformer_engine": "TransformerEngine's FusedAdam", "apex": "Apex's FusedAdam"}
"""Package -> the optimizer that Megatron takes from the first of them that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    attention: str
    norms: str
    optimizer: str

    @staticmethod
    def of(*, head_dim: int, on_cuda: bool) -> "Kernels":
        """`head_dim`: of queries or values, whichever is smaller."""
        attention = "torch SDPA, calls for each branch of a prefix tree"
        if on_cuda and head_dim >= SMALLEST_FLEX_HEAD:
            attention = "torch FlexAttention, one kernel for a packed row"
        installed = (name for package, name in _FUSED_ADAM.items() if importlib.util.find_spec(package))
        optimizer = next(installed, "torch AdamW")
        return Kernels(attention=attention, norms="torch", optimizer=optimizer)

    def __str__(self) -> str:
        text = f"attention: {self.attention}; norms: {self.norms}; optimizer: {self.optimizer}"
        if importlib.util.find_spec("flash_attn"):
            text += "; flash-attn is installed and not used: it has no mask for prefix trees"
        return text
