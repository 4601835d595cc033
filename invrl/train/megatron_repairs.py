"""Repairs of megatron-core 0.16.1: modules that break without TransformerEngine, and experts in groups.

They act on the whole process. `repair_megatron` imports Megatron.
"""

from typing import Any

import torch


def repair_megatron() -> None:
    import megatron.core.extensions.transformer_engine as transformer_engine
    import megatron.core.transformer.moe.moe_utils as router
    import megatron.core.transformer.multi_latent_attention as latent_attention

    moe_utils: Any = router
    if not hasattr(router, "te_general_gemm"):
        # The router looks up TransformerEngine's matrix product by a name that is then undefined. None makes
        # it use torch's.
        moe_utils.te_general_gemm = None
    moe_utils.group_limited_topk = best_of_best_groups
    # Where this is set, it compares with TransformerEngine's classes, which are then mocks.
    latent_attention.HAVE_TE = transformer_engine.HAVE_TE


def best_of_best_groups(
    scores: torch.Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores and the numbers [tokens, topk] of each token's experts: the best of its best groups.

    A group counts by the sum of its two best scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, as
    transformers and SGLang compute it). Megatron counts `topk / group_topk` of them. `scores`: [tokens,
    experts]; the experts of a group are neighbours.
    """
    scores_TGE = scores.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores_TG = scores_TGE.topk(2, dim=-1).values.sum(dim=-1)
    best_groups = group_scores_TG.topk(group_topk, dim=-1).indices
    is_left_out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(1, best_groups, False)
    limited = scores_TGE.masked_fill(is_left_out_TG[:, :, None], float("-inf")).flatten(1)
    best = limited.topk(topk, dim=-1)
    return best.values, best.indices
