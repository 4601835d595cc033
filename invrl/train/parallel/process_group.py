"""The torch process group of the trainer's ranks, and Megatron's groups over it.

Imported after `device.prepare()`.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import PrefixStore

from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.errors import TrainError
from invrl.host.network.rendezvous import (
    interface_towards,
    join_store,
    refuse_new_connections,
    refuse_unknown_connections,
    serve_store,
)
from invrl.train.rank_settings import RankSettings
from invrl.train.runtime import device

Item = TypeVar("Item")


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank. All ranks call it together."""
    return bool(max_over_ranks(float(flag)))


def max_over_ranks(value: float) -> float:
    """Return the largest value of all ranks, which call it together."""
    return _largest(value, None)


def max_over_expert_ranks(value: float) -> float:
    """Return the largest value of the ranks that divide the experts of a layer, which
    call it together."""
    return _largest(value, parallel_state.get_expert_model_parallel_group())


def _largest(value: float, group: Any) -> float:
    values = torch.tensor(value, dtype=torch.float64, device=device.device())
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=group)
    return float(values)


def mean_over_ranks(totals: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the mean of each number over all ranks: its totals over its weights. NaN
    without any weight. All ranks call it together; those that have the same tokens
    count them alike."""
    sums = torch.tensor(
        [*totals, *weights], dtype=torch.float64, device=device.device()
    )
    torch.distributed.all_reduce(sums)
    return (sums[: len(totals)] / sums[len(totals) :]).tolist()


def sum_over_replicas(values: Sequence[float]) -> list[float]:
    """Sum each of these over the data-parallel ranks, in float64. These ranks call it
    together."""
    summed = torch.tensor(list(values), dtype=torch.float64, device=device.device())
    torch.distributed.all_reduce(summed, group=parallel_state.get_data_parallel_group())
    return summed.tolist()


def sum_in_order(own: float, ranks: Iterable[int]) -> float:
    """Sum the values of these ranks, in float64 and in this order, so that the result
    is the same number on every rank, to the last bit. All ranks call it together."""
    value = torch.tensor([own], dtype=torch.float64, device=device.device())
    values = [
        torch.zeros_like(value) for _ in range(torch.distributed.get_world_size())
    ]
    torch.distributed.all_gather(values, value)
    total = 0.0
    for rank in ranks:
        total += float(values[rank])
    return total


def gather_from_replicas(own: Item) -> list[Item]:
    """Return the objects of all data-parallel ranks, in the order of the ranks, which
    call it together."""
    group = cast(
        torch.distributed.ProcessGroup, parallel_state.get_data_parallel_group()
    )
    items: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(items, own, group=group)
    return items


def gather_samples(own: SampleTable) -> tuple[SampleTable, int]:
    """Return the samples of all data-parallel ranks, in the order of the ranks, and
    where this rank's own begin. These ranks call it together."""
    group = cast(
        torch.distributed.ProcessGroup, parallel_state.get_data_parallel_group()
    )
    tables = gather_from_replicas(own)
    before = tables[: group.rank()]
    return SampleTable.joined(tables), sum(len(table.group_ids) for table in before)


def join_process_group(
    settings: RankSettings, port: int, listener: socket.socket | None
) -> None:
    """Join all ranks into one process group and seed the random generators.

    `port` is the port on which rank 0 listens; `listener` is rank 0's listening socket
    there and None on the other ranks. Raises torch's error if the other ranks do not
    come within `train_step_timeout_s`, TrainError if a stranger is connected to the
    store.
    """
    if device.on_cuda():
        torch.cuda.set_device(0)  # each rank sees its own GPU first
    elif settings.visible_gpus is not None:
        # It would train on the CPU, without a word.
        raise TrainError(
            f"trainer rank {settings.rank} cannot use its GPU (CUDA_VISIBLE_DEVICES={settings.visible_gpus}) "
            f"with torch {torch.__version__}; `invrl doctor` may say why"
        )
    world_size = settings.layout.world_size
    timeout = timedelta(seconds=settings.train.train_step_timeout_s)
    if listener is not None:
        store = serve_store(listener, world_size=world_size, timeout=timeout)
    else:
        store = join_store(
            settings.master_addr, port, world_size=world_size, timeout=timeout
        )
    # Without these variables gloo and NCCL listen on the address that the host name
    # resolves to.
    interface = interface_towards(settings.master_addr)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if settings.broadcast_on_gpu:
        interface = interface_towards(settings.broadcast_host)
        # As SGLang has it in its processes: members of a group must agree.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    torch.distributed.init_process_group(
        device.backend(),
        store=PrefixStore(settings.store_key, store),
        rank=settings.rank,
        world_size=world_size,
        timeout=timeout,
    )
    layout = settings.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline
        if layout.virtual_pipeline > 1
        else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    # On GPUs the store stays open, because communicators connect when they are first
    # used.
    if listener is not None and not device.groups_connect_late():
        refuse_new_connections(listener)
        refuse_unknown_connections(listener, members=world_size)
    torch.manual_seed(settings.seed)
    model_parallel_cuda_manual_seed(settings.seed)
