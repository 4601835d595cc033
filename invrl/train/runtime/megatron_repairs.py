"""Repairs of megatron-core 0.16.1: modules that break without TransformerEngine,
experts in groups, an import that leaves folders in TMPDIR, and irrelevant warnings.

They act on the whole process. `repair_megatron` imports Megatron.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_KNOWN_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
)
"""Beginnings of warnings from every rank without these packages. `invrl doctor` reports
the packages that the trainer uses; the others are about lines of Megatron itself."""
_GPU_ADVICE = "When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE"
"""Beginning of a warning from a rank without a GPU."""


def ignore_known_warnings() -> None:
    """Keep these warnings out of a rank's log, whose last lines are shown when the rank
    has died. Call it before Megatron is imported."""
    on_this_device = () if torch.cuda.is_available() else (_GPU_ADVICE,)
    for beginning in _KNOWN_WARNINGS + on_this_device:
        warnings.filterwarnings("ignore", message=re.escape(beginning))


@contextmanager
def hide_wandb() -> Iterator[None]:
    """Make `import wandb` fail within the block, unless wandb has been imported before.

    Megatron imports it for timers that no rank uses. wandb makes two folders in TMPDIR,
    to be removed when the interpreter ends, but a rank is killed. User code can import
    it afterwards.
    """
    modules: dict[str, Any] = sys.modules
    if "wandb" in modules:
        yield
        return
    modules["wandb"] = None  # `import` raises ModuleNotFoundError for such a name
    try:
        yield
    finally:
        del modules["wandb"]


def repair_megatron() -> None:
    import megatron.core.extensions.transformer_engine as transformer_engine
    import megatron.core.transformer.moe.moe_utils as router
    import megatron.core.transformer.multi_latent_attention as latent_attention

    moe_utils: Any = router
    if not hasattr(router, "te_general_gemm"):
        # The router looks up TransformerEngine's matrix product by a name that is then
        # undefined. None makes it use torch's.
        moe_utils.te_general_gemm = None
    moe_utils.group_limited_topk = best_of_best_groups
    # Where this is set, it compares with TransformerEngine's classes, which are then
    # mocks.
    latent_attention.HAVE_TE = transformer_engine.HAVE_TE


def batch_gradient_clipping() -> None:
    """Clip all gradients together. Without TransformerEngine and Apex, Megatron reads
    the norm of each gradient from the GPU separately, and scales each separately.
    Imports Megatron."""
    import megatron.core.optimizer.clip_grads as module
    from megatron.core import utils as megatron_utils

    clip_grads: Any = module
    if clip_grads.l2_norm_impl is megatron_utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
        clip_grads.multi_tensor_scale_impl = scale_all


def norm_of_all(
    _chunk_size: int,
    _flag: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    _per_tensor: bool,
) -> tuple[torch.Tensor, None]:
    """Return the norm [1] of all tensors of the first list together, on their device.
    The signature is Apex's."""
    return torch.nn.utils.get_total_norm(lists[0]).reshape(1), None


def scale_all(
    _chunk_size: int,
    _flag: torch.Tensor,
    lists: Sequence[Sequence[torch.Tensor]],
    scale: float,
) -> None:
    """Scale the tensors of the first list in place, because clipping writes where it
    reads. The signature is Apex's."""
    torch._foreach_mul_(list(lists[0]), scale)  # pyright: ignore[reportPrivateImportUsage]


def best_of_best_groups(
    scores: torch.Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and the numbers [tokens, topk] of each token's experts: the
    best of its best groups.

    A group counts by the sum of its two best scores (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2, as transformers and SGLang compute it). Megatron counts `topk /
    group_topk` of them. `scores` is [tokens, experts]; the experts of a group are
    neighbours.
    """
    scores_TGE = scores.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores_TG = scores_TGE.topk(2, dim=-1).values.sum(dim=-1)
    best_groups = group_scores_TG.topk(group_topk, dim=-1).indices
    is_left_out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter(
        1, best_groups, False
    )
    limited = scores_TGE.masked_fill(is_left_out_TG[:, :, None], float("-inf")).flatten(
        1
    )
    best = limited.topk(topk, dim=-1)
    return best.values, best.indices
