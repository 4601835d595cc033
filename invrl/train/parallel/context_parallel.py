"""Context parallelism among the ranks: this rank's share of a micro-batch, and what the
ranks gather.

Imported after `device.prepare()`.
"""

from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.distributed import ProcessGroup, all_reduce

from invrl.train.batches.micro_batch import MicroBatch
from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device


def own_share(micro_batch: MicroBatch) -> ContextShare:
    """Return this rank's share, filled up so that tensor-parallel ranks can divide it
    and attention has whole tiles."""
    group = _group()
    return ContextShare.of(
        micro_batch,
        rank=group.rank(),
        ranks=group.size(),
        multiple=device.tokens_multiple(
            parallel_state.get_tensor_model_parallel_world_size()
        ),
    )


def gather_keys(
    key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values [P, 1, heads, dim] of all ranks, rank by rank, from those
    of each rank's own tokens.

    Their gradients are summed over the ranks, for each has its own queries.
    """
    group = _group()
    if group.size() == 1:
        return key, value
    gathered = gather_from_sequence_parallel_region(
        torch.cat([key, value], dim=-1), tensor_parallel_output_grad=True, group=group
    )
    gathered_key, gathered_value = gathered.split(
        [key.shape[-1], value.shape[-1]], dim=-1
    )
    return gathered_key, gathered_value


def gather_wanted(own_S: torch.Tensor, is_own_N: torch.Tensor) -> torch.Tensor:
    """Gather a number, or a row of them, for each of the wanted tokens [N] on every
    rank, from those of the S tokens that each rank predicts (`is_own_N`; every token
    has one rank).

    Every rank computes the same loss from them, so the gradient of its own numbers is
    whole, and nothing is summed over ranks in the backward pass.
    """
    group = _group()
    if group.size() == 1:
        return own_S
    return _Gather.apply(own_S, is_own_N, group)


def _group() -> ProcessGroup:
    return cast(ProcessGroup, parallel_state.get_context_parallel_group())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_S: torch.Tensor, is_own_N: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        gathered_N = own_S.new_zeros((len(is_own_N), *own_S.shape[1:]))
        gathered_N[is_own_N] = own_S
        all_reduce(gathered_N, group=group)
        ctx.save_for_backward(is_own_N)
        return gathered_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (is_own_N,) = ctx.saved_tensors
        return grads[0][is_own_N], None, None
