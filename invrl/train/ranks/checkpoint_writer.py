"""Writes a Megatron checkpoint tensor by tensor.

Megatron's own saver copies the optimizer's state, on every rank, into buffers as large
as the model; copies it out of them again for its writers; and forks a process per file:
for SmolLM2-135M a trainer of 3.9 GB grew to 8.6 GB. Here a tensor is read from where it
lives when it is written. If data-parallel ranks share its state, the parts are gathered
on the group's first rank while it is written. The format is Megatron's `torch_dist`
with its `fully_reshardable` optimizer state. `checkpoint_reader.py` reads it, and
Megatron's own loader could.

Invariant: all ranks gather the same tensors in the same order, even if one rank's disk
has failed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from invrl.store.checksummed_file import ChecksummedFile
from invrl.train.ranks.checkpoint_reader import OwnShare
from invrl.train.ranks.joint_write import disk_error
from invrl.train.ranks.placeholders import Placeholders, storage_key
from invrl.types.file_entry import FileEntry

_STATES = ("param", "exp_avg", "exp_avg_sq")
"""States of a parameter: its float32 master weight and Adam's moments."""

Gather = Callable[[], torch.Tensor | None]
"""Function called on all ranks together. Returns the flat tensor on the rank that
writes it, None on the others."""


LateTensors = Placeholders[Gather]
"""Placeholders of tensors that are gathered only when they are written."""


@dataclass(frozen=True, slots=True)
class StatePlaceholders:
    """Placeholders of the states of optimizers."""

    late: LateTensors = field(default_factory=LateTensors)
    """In a state dict that is saved."""
    shares: Placeholders[OwnShare] = field(default_factory=Placeholders[OwnShare])
    """In a state dict that is loaded."""

    def use_for(self, optimizer: DistributedOptimizer) -> None:
        """Replace the method with which the optimizer returns its state for
        checkpoints: it then returns placeholders."""
        owner: Any = optimizer
        owner.sharded_param_state_fully_reshardable = partial(
            _sharded_states, owner, self
        )


def _sharded_states(
    optimizer: Any,
    placeholders: StatePlaceholders,
    model: Any,
    is_loading: bool,
    _metadata: Any,
) -> dict[int, dict[str, Any]]:
    """Replace `DistributedOptimizer.sharded_param_state_fully_reshardable`: for each
    parameter, by its number, its states under the parameter's own sharding."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    sharded_by_parameter = {tensor.data: tensor for tensor in nested_values(sharded)}
    states: dict[int, dict[str, Any]] = {}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            model_tensor = sharded_by_parameter[parameter]
            parameter_states: dict[str, Any] = {}
            for state in _STATES:
                if is_loading:
                    share = _own_share(optimizer, buffer, parameter, state)
                    data = placeholders.shares.add(parameter.numel(), share)
                else:
                    gather = partial(_gather_state, optimizer, buffer, parameter, state)
                    data = placeholders.late.add(parameter.numel(), gather)
                changes: dict[str, Any] = {
                    "key": f"optimizer.state.{state}.{model_tensor.key}",
                    "data": data.view(model_tensor.data.shape),
                }
                if not isinstance(model_tensor, ShardedTensorFactory):
                    changes["dtype"] = torch.float32
                elif is_loading:
                    changes["merge_fn"] = _leave_apart
                parameter_states[state] = replace(model_tensor, **changes)
            states[len(states)] = parameter_states
    return states


def _leave_apart(_parts: Any) -> None:
    """Join nothing: what Megatron would join are placeholders. Their parts have been
    read to where they live."""


def _group(optimizer: Any) -> torch.distributed.ProcessGroup:
    """Return the data-parallel ranks that share the state; the group over the CPU if
    there is one."""
    return optimizer.data_parallel_group_gloo or optimizer.data_parallel_group


def _own_part(
    optimizer: Any, parameter: torch.nn.Parameter, state: str
) -> torch.Tensor:
    """Return this rank's part of one state of one parameter, flat."""
    return (
        optimizer._get_main_param_and_optimizer_states(parameter)[state]
        .detach()
        .view(-1)
    )


def _own_share(
    optimizer: Any, buffer: Any, parameter: torch.nn.Parameter, state: str
) -> OwnShare:
    group = _group(optimizer)
    start, end = _shares(buffer, parameter, group.size())[group.rank()]
    if start == end:
        return OwnShare(start, torch.empty(0))
    return OwnShare(start, _own_part(optimizer, parameter, state))


def _gather_state(
    optimizer: Any, buffer: Any, parameter: torch.nn.Parameter, state: str
) -> torch.Tensor | None:
    """Return one state of one parameter, flat, on the group's first rank; None on the
    others."""
    group = _group(optimizer)
    shares = _shares(buffer, parameter, group.size())
    start, end = shares[group.rank()]
    part = None
    if start < end:
        part = _own_part(optimizer, parameter, state)
    if group.rank() != 0:
        if part is not None:
            torch.distributed.send(part.cpu(), group=group, group_dst=0)
        return None
    numel = parameter.numel()
    if part is not None and len(part) == numel:
        return part
    whole = torch.empty(numel, dtype=torch.float32)
    if part is not None:
        whole[start:end] = part
    for rank, (start, end) in enumerate(shares):
        if rank > 0 and start < end:
            torch.distributed.recv(whole[start:end], group=group, group_src=rank)
    return whole


def _shares(
    buffer: Any, parameter: torch.nn.Parameter, num_ranks: int
) -> list[tuple[int, int]]:
    """Return the elements [start, end) of the flat parameter that each rank holds; an
    empty range for none.

    Megatron cuts each bucket of the buffer into equal parts, one per rank, regardless
    of parameter boundaries.
    """
    parameter_start, parameter_end, bucket_id = buffer.param_index_map[parameter]
    bucket = buffer.buckets[bucket_id]
    part_length = bucket.grad_data.numel() // num_ranks
    shares: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        part_start = bucket.offset + rank * part_length
        start = max(parameter_start, part_start)
        end = max(start, min(parameter_end, part_start + part_length))
        shares.append((start - parameter_start, end - parameter_start))
    return shares


class TensorByTensor(TorchDistSaveShardedStrategy):
    """Strategy of `dist_checkpointing.save` for tensors. `late` has the placeholders in
    the state dict. With `copies`, everything that this rank writes is copied when a
    request is made, so that its work may be done in another thread while training
    changes the tensors."""

    def __init__(self, late: LateTensors, *, copies: bool) -> None:
        super().__init__("torch_dist", 1)
        self._late = late
        self._copies = copies
        self._writer: _Writer | None = None
        self.written: dict[str, FileEntry] = {}
        """File written by this rank, by its name."""

    def check_written(self) -> None:
        """Raise this rank's first failure to write."""
        assert self._writer is not None, "nothing has been saved"
        if self._writer.failure is not None:
            raise self._writer.failure

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Return a request whose work is done in this process when it is executed."""
        state_by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self._writer = writer = _Writer(checkpoint_dir, self._late, self.written)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
        )
        torch_state = mcore_to_pyt_state_dict(state_by_key, False)
        planned, *_ = save_state_dict_async_plan(
            torch_state, writer, None, 0, planner=planner
        )
        if self._copies:
            writer.copy()
        return self._get_save_and_finalize_callbacks(writer, planned)


class _Writer(FileSystemWriterAsync):
    """Writes this rank's items into one file, whose entry is added to `written`."""

    def __init__(
        self, folder: Path, late: LateTensors, written: dict[str, FileEntry]
    ) -> None:
        super().__init__(folder, thread_count=1)
        self._late = late
        self._written = written
        self._results: list[WriteResult] = []
        self.failure: Exception | None = None
        """First failure to write. It is not raised where it happens: the other ranks
        would wait for this one in the next gather."""
        self._copied: Iterator[tuple[WriteItem, Any]] | None = None

    def copy(self) -> None:
        """Copy what this rank writes, on all ranks together."""
        copied = deque((item, _copy(data)) for item, data in self._items())
        # Each copy is freed once it is written.
        self._copied = (copied.popleft() for _ in range(len(copied)))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._plan = plan
        self._planner = planner

    def get_save_function_and_args(self) -> Any:
        return self._write_all, None, []

    def retrieve_write_results(self) -> Any:
        return self._results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' files, on the rank that gathers their
        results."""
        with self._failure_recorded():
            super().finish(metadata, results)

    def _items(self) -> Iterator[tuple[WriteItem, Any]]:
        """Yield what this rank writes: the tensors that it holds, then the gathered
        ones."""
        late_items: dict[int, list[tuple[WriteItem, torch.Tensor]]] = {}
        for item in self._plan.items:
            data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor) and data.is_meta:
                late_items.setdefault(storage_key(data), []).append((item, data))
            else:
                yield item, data
        for key, gather in self._late.values():
            whole = gather()
            for item, placeholder in late_items.pop(key, []):
                assert whole is not None, f"{item.index.fqn} is another rank's"
                offset = whole.storage_offset() + placeholder.storage_offset()
                yield (
                    item,
                    whole.as_strided(placeholder.size(), placeholder.stride(), offset),
                )
        assert not late_items, f"{len(late_items)} placeholders have no tensor"

    def _write_all(self) -> None:
        storage: Any = self._plan.storage_data
        name = f"{storage.prefix}0{DEFAULT_SUFFIX}"
        stream: Any = None
        with self._failure_recorded():
            stream = ChecksummedFile(Path(self.checkpoint_dir) / name)
        try:
            for item, data in self._copied or self._items():
                self._write(stream, name, item, data)
        finally:
            if stream is not None:
                with self._failure_recorded():
                    stream.close()  # a full disk may be noticed only here, when the buffer is flushed
                    self._written[name] = stream.entry()

    @contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure = disk_error(error) or error

    def _write(self, stream: Any, name: str, item: WriteItem, data: Any) -> None:
        """Write one item; do nothing after a failure."""
        if self.failure is not None:
            return
        with self._failure_recorded():
            if item.type != WriteItemType.BYTE_IO:
                data = data.detach().cpu()
                if data.untyped_storage().nbytes() != data.nbytes:
                    data = data.clone()  # torch.save would write the whole storage
            transforms: Any = self.transforms
            result = _write_item(
                transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE
            )
            self._results.append(result)


def _copy(data: Any) -> Any:
    """Copy a tensor to the CPU's memory. Other data was serialised for this checkpoint
    alone."""
    if not isinstance(data, torch.Tensor):
        return data
    return data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
