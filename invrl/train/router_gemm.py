"""A repair of Megatron's router of experts where TransformerEngine is absent.

The router looks up TransformerEngine's matrix product by a name that is then undefined; None makes it use
torch's.
"""

from typing import Any


def repair_router_gemm() -> None:
    """Imports Megatron. Does nothing where TransformerEngine is installed."""
    import megatron.core.transformer.moe.moe_utils as module

    if not hasattr(module, "te_general_gemm"):
        moe_utils: Any = module
        moe_utils.te_general_gemm = None
