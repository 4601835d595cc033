"""Implementations of a trainer's attention, norms, experts and optimizer on a machine.

`device.py` chooses the attention, torch the products of the experts
(`layers/grouped_linear.py`), Megatron the optimizer when it is imported. This file
predicts them without importing torch or Megatron.
"""

import importlib.util
from dataclasses import dataclass

SMALLEST_FLEX_HEAD = 16
"""Smallest head dimension that torch's FlexAttention has a kernel for."""
FLEX_TILE = 128
"""Queries and keys of one tile of FlexAttention's mask."""
_FUSED_ADAM = {
    "transformer_engine": "TransformerEngine's FusedAdam",
    "apex": "Apex's FusedAdam",
}
"""Package -> the optimizer that Megatron takes from the first installed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    attention: str
    norms: str
    experts: str | None
    """None: no layer has experts."""
    optimizer: str

    @staticmethod
    def of(*, head_dim: int, has_experts: bool, dtype: str, on_cuda: bool) -> "Kernels":
        """Predict the kernels. `head_dim` is that of queries or values, whichever is
        smaller; `dtype` is that of the weights."""
        attention = "torch SDPA, calls for each branch of a prefix tree"
        if on_cuda and head_dim >= SMALLEST_FLEX_HEAD:
            attention = "torch FlexAttention, one kernel for a packed row"
        experts = None
        if has_experts:
            experts = "torch grouped_mm, a product for each expert"
            if on_cuda and dtype == "bfloat16":
                experts = "torch grouped_mm, one kernel for all experts (on compute capability 9.0 and 10.0)"
        return Kernels(
            attention=attention,
            norms="torch",
            experts=experts,
            optimizer=fused_adam() or "torch AdamW",
        )

    def __str__(self) -> str:
        text = f"attention: {self.attention}; norms: {self.norms}; optimizer: {self.optimizer}"
        if self.experts is not None:
            text += f"; experts: {self.experts}"
        if importlib.util.find_spec("flash_attn"):
            text += "; flash-attn is installed and not used: it has no mask for prefix trees"
        return text


def fused_adam() -> str | None:
    """Name the optimizer that Megatron takes in place of torch's; None: there is
    none."""
    installed = (
        name
        for package, name in _FUSED_ADAM.items()
        if importlib.util.find_spec(package)
    )
    return next(installed, None)
