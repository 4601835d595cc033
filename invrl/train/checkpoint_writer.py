"""Writes a Megatron checkpoint tensor by tensor.

Megatron's own saver copies the optimizer's state into buffers as large as the model, on every rank; copies it
out of them again for its writers; and forks a process per file: for SmolLM2-135M a trainer of 3.9 GB grew to
8.6 GB. Here a tensor is taken from where it lives when it is written, and where data-parallel ranks share its
state, the parts come together on the group's first rank for as long as that takes. The format is Megatron's
`torch_dist`, with its `fully_reshardable` optimizer state; its own loader reads it, into the optimizer's own
memory where one rank has it all.

Invariant: all ranks gather the same tensors in the same order, also where the disk of one has failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""Of a parameter: the float32 master weight and Adam's moments."""

Gather = Callable[[], torch.Tensor | None]
"""All ranks together. Gives the flat tensor on the rank that writes it, None on the others."""


class LateTensors:
    """Tensors that are gathered when they are written. In the state dict a tensor without memory (on torch's
    meta device) stands for each; its views, and what is detached from it, share its storage and are known by
    that."""

    def __init__(self) -> None:
        self._gathers: dict[int, Gather] = {}
        self._kept: list[torch.Tensor] = []
        """Storages that live have addresses of their own."""

    def clear(self) -> None:
        self._gathers.clear()
        self._kept.clear()

    def stand_in(self, numel: int, gather: Gather) -> torch.Tensor:
        """Flat, float32."""
        tensor = torch.empty(numel, dtype=torch.float32, device="meta")
        self._gathers[_storage_of(tensor)] = gather
        self._kept.append(tensor)
        return tensor

    def gathers(self) -> list[tuple[int, Gather]]:
        """By storage, in the order in which the tensors were asked for."""
        return list(self._gathers.items())


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def gather_late(optimizer: DistributedOptimizer, late: LateTensors) -> None:
    """From now on the state that this optimizer gives for saving stands for tensors that are gathered later.
    What it gives for loading is its own memory where no other rank shares it, and Megatron's copy else."""
    owner: Any = optimizer
    owner.sharded_param_state_fully_reshardable = partial(
        _states, owner, late, owner.sharded_param_state_fully_reshardable
    )


def _states(
    optimizer: Any, late: LateTensors, copied_states: Any, model: Any, is_loading: bool, metadata: Any
) -> dict[int, dict[str, Any]]:
    """As `DistributedOptimizer.sharded_param_state_fully_reshardable`: for each parameter, by its number, its
    state under the parameter's own sharding."""
    if is_loading and _group(optimizer).size() > 1:
        return copied_states(model, is_loading, metadata)
    sharded, _ = extract_sharded_tensors_and_factories(model)
    by_parameter = {one.data: one for one in nested_values(sharded)}
    parameters = [(buffer, parameter) for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    states: dict[int, dict[str, Any]] = {}
    for number, (buffer, parameter) in enumerate(parameters):
        own = by_parameter[parameter]
        states[number] = {}
        for state in _STATES:
            if is_loading:
                data = _part(optimizer, parameter, state)
            else:
                gather = partial(_gather, optimizer, buffer, parameter, state)
                data = late.stand_in(parameter.numel(), gather)
            changes: dict[str, Any] = {
                "key": f"optimizer.state.{state}.{own.key}",
                "data": data.view(own.data.shape),
            }
            if not isinstance(own, ShardedTensorFactory):
                changes["dtype"] = torch.float32
            states[number][state] = replace(own, **changes)
    return states


def _group(optimizer: Any) -> torch.distributed.ProcessGroup:
    """The data-parallel ranks that share the state, over the CPU where such a group was made."""
    return optimizer.data_parallel_group_gloo or optimizer.data_parallel_group


def _part(optimizer: Any, parameter: torch.nn.Parameter, state: str) -> torch.Tensor:
    """This rank's part of one state of one parameter, flat."""
    return optimizer._get_main_param_and_optimizer_states(parameter)[state].detach().view(-1)


def _gather(optimizer: Any, buffer: Any, parameter: torch.nn.Parameter, state: str) -> torch.Tensor | None:
    """One state of one parameter, flat, on the group's first rank. Megatron cuts each bucket of the buffer
    into equal parts, one per rank, wherever a parameter ends."""
    group = _group(optimizer)
    begin, end, bucket_id = buffer.param_index_map[parameter]
    bucket = buffer.buckets[bucket_id]
    length = bucket.grad_data.numel() // group.size()
    shares = []
    for rank in range(group.size()):
        first = max(begin, bucket.offset + rank * length)
        last = min(end, bucket.offset + (rank + 1) * length)
        shares.append((first - begin, max(first, last) - begin))
    first, last = shares[group.rank()]
    part = _part(optimizer, parameter, state) if first < last else None
    if group.rank() != 0:
        if part is not None:
            torch.distributed.send(part.cpu(), group=group, group_dst=0)
        return None
    if part is not None and len(part) == end - begin:
        return part
    whole = torch.empty(end - begin, dtype=torch.float32)
    for rank, (first, last) in enumerate(shares):
        if rank == 0 and part is not None:
            whole[first:last] = part
        elif first < last:
            torch.distributed.recv(whole[first:last], group=group, group_src=rank)
    return whole


class TensorByTensor(TorchDistSaveShardedStrategy):
    """How `dist_checkpointing.save` writes tensors. `late`: those of the state dict that it is given."""

    def __init__(self, late: LateTensors) -> None:
        super().__init__("torch_dist", 1)
        self._late = late

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """A request whose work is done in this process and thread when it is executed."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = _Writer(checkpoint_dir, self._late)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        planned, *_ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(by_key, False), writer, None, 0, planner=planner
        )
        return self._get_save_and_finalize_callbacks(writer, planned)


class _Writer(FileSystemWriterAsync):
    """Writes this rank's items into one file."""

    def __init__(self, folder: Path, late: LateTensors) -> None:
        super().__init__(folder, thread_count=1)
        self._late = late
        self._results: list[WriteResult] = []
        self._fault: Exception | None = None

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._plan = plan
        self._planner = planner

    def get_save_function_and_args(self) -> Any:
        return self._write_all, None, []

    def retrieve_write_results(self) -> Any:
        return self._results if self._fault is None else _wrap_exception(self._fault)

    def _write_all(self) -> None:
        """First what is here, then what is gathered."""
        storage: Any = self._plan.storage_data
        name = f"{storage.prefix}0{DEFAULT_SUFFIX}"
        waiting: dict[int, list[tuple[WriteItem, torch.Tensor]]] = {}
        stream: Any = None
        with self._fault_kept():
            stream = (Path(self.checkpoint_dir) / name).open("wb")
        try:
            write = partial(self._write, stream, name)
            for item in self._plan.items:
                data = self._planner.resolve_data(item)
                if isinstance(data, torch.Tensor) and data.is_meta:
                    waiting.setdefault(_storage_of(data), []).append((item, data))
                else:
                    write(item, data)
            for key, gather in self._late.gathers():
                whole = gather()
                for item, stand_in in waiting.pop(key, ()):
                    assert whole is not None, f"{item.index.fqn} is another rank's"
                    offset = whole.storage_offset() + stand_in.storage_offset()
                    write(item, whole.as_strided(stand_in.size(), stand_in.stride(), offset))
        finally:
            if stream is not None:
                with self._fault_kept():
                    stream.close()  # what is in the buffer meets a full disk here
        assert not waiting, f"{len(waiting)} tensors stand for nothing"

    @contextmanager
    def _fault_kept(self) -> Iterator[None]:
        """The first failure is this rank's result. It is not raised: other ranks would be left waiting."""
        try:
            yield
        except Exception as error:
            if self._fault is None:
                self._fault = _disk_error(error) or error

    def _write(self, stream: Any, name: str, item: WriteItem, data: Any) -> None:
        """Once something has failed nothing more is written."""
        if self._fault is not None:
            return
        with self._fault_kept():
            if item.type != WriteItemType.BYTE_IO:
                data = data.detach().cpu()
                if data.untyped_storage().nbytes() != data.nbytes:  # torch.save writes all of a storage
                    data = data.clone()
            transforms: Any = self.transforms
            written = _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
            self._results.append(written)


def _disk_error(error: BaseException) -> OSError | None:
    """What the disk said, where torch's writer then fails over the bytes that are missing."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause
