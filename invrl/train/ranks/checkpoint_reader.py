"""Reads a Megatron checkpoint tensor by tensor, of the optimizer's state only what this
rank holds.

With Megatron's own loader, each of the data-parallel ranks that share the state reads
all of it, 12 bytes a parameter, and cuts its share out afterwards. Here a saved tensor
is read if the rank's share has some of it, and that part is copied to where it lives.
Memory is needed for one saved tensor and for one parameter.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistLoadShardedStrategy,
    _get_filesystem_reader,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load_state_dict

from invrl.train.ranks.placeholders import Placeholders


@dataclass(frozen=True, slots=True, eq=False)
class OwnShare:
    """The elements of a flat tensor that this rank holds."""

    start: int
    part: torch.Tensor
    """Flat, where the rank holds them. Empty: it holds none."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The elements of a flat tensor from the first to the last of a region, which a
    saved tensor fills. A region that is a block of columns does not fill all of
    them."""

    region: torch.Tensor
    """View of the tensor's placeholder."""
    share: OwnShare

    @property
    def numel(self) -> int:
        """Count the elements from the first to the last of the region."""
        strides = zip(self.region.size(), self.region.stride(), strict=True)
        return 1 + sum((length - 1) * stride for length, stride in strides)

    @property
    def own(self) -> slice:
        """Return the elements of the window that this rank holds."""
        shift = self.share.start - self.region.storage_offset()
        start = max(0, shift)
        end = min(self.numel, shift + self.share.part.numel())
        return slice(start, max(start, end))

    @property
    def has_own(self) -> bool:
        return self.own.start < self.own.stop

    def buffer(self) -> torch.Tensor:
        """Make a flat buffer for the window. It has the elements of this rank that
        the region leaves out."""
        buffer = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        if not self.region.is_contiguous():
            buffer[self.own] = self._own_part().cpu()
        return buffer

    def in_region(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the region as a view of the buffer."""
        return buffer.as_strided(self.region.size(), self.region.stride(), 0)

    def write_back(self, buffer: torch.Tensor) -> None:
        """Copy the buffer's elements that this rank holds to where it holds them."""
        self._own_part().copy_(buffer[self.own])

    def _own_part(self) -> torch.Tensor:
        shift = self.region.storage_offset() - self.share.start
        own = self.own
        return self.share.part[shift + own.start : shift + own.stop]


def read_checkpoint(
    sharded: dict[str, Any], path: str, shares: Placeholders[OwnShare]
) -> Any:
    """Fill a sharded state dict from the checkpoint at `path`, and return it as
    `dist_checkpointing.load` does. What `shares` has placeholders for is read into the
    shares; the placeholders stay. All ranks call it together."""
    return dist_checkpointing.load(
        sharded, path, sharded_strategy=_TensorByTensorLoad(shares)
    )


class _TensorByTensorLoad(TorchDistLoadShardedStrategy):
    """Megatron's strategy of loading, with another planner."""

    def __init__(self, shares: Placeholders[OwnShare]) -> None:
        super().__init__()
        self._shares = shares

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        tensors = [
            value
            for value in nested_values(sharded_state_dict)
            if isinstance(value, ShardedTensor)
        ]
        planner = _SharePlanner(
            self._shares,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
            shapes_validation_sharded_tensors=[
                tensor for tensor in tensors if not tensor.allow_shape_mismatch
            ],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
            },
        )
        by_key, flat_mapping, rename_mapping = (
            _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        )
        torch_state: Any = mcore_to_pyt_state_dict(by_key, True)
        reader = _get_filesystem_reader(checkpoint_dir, cache_metadata=True)
        load_state_dict(torch_state, reader, planner=planner)
        filled: Any = {
            key: _unwrap_pyt_sharded_tensor(value) for key, value in torch_state.items()
        }
        state = _replace_sharded_keys_with_state_dict_keys(
            filled, flat_mapping, rename_mapping
        )
        _restore_dict_types(state, sharded_state_dict)
        return state


class _SharePlanner(MCoreLoadPlanner):
    """Plans to read what this rank holds. For each item torch's reader asks for a
    tensor to fill, fills it, and gives it back, one item after another."""

    def __init__(self, shares: Placeholders[OwnShare], **options: Any) -> None:
        super().__init__(**options)
        self._shares = shares
        self._opened: tuple[Window, torch.Tensor] | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state dict as it is. torch's own planner would give placeholders
        memory, or refuse them."""
        self.original_state_dict = state_dict
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return replace(
            plan, items=[item for item in plan.items if self._is_wanted(item)]
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        window = self._window(read_item)
        if window is None:
            return super().resolve_tensor(read_item)
        buffer = window.buffer()
        self._opened = (window, buffer)
        return window.in_region(buffer)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if self._opened is None:
            super().commit_tensor(read_item, tensor)
            return
        window, buffer = self._opened
        window.write_back(buffer)
        self._opened = None

    def _is_wanted(self, item: ReadItem) -> bool:
        if item.type == LoadItemType.BYTE_IO:
            return True
        window = self._window(item)
        return window is None or window.has_own

    def _window(self, item: ReadItem) -> Window | None:
        """Return the window that the item fills; None if it fills a tensor with
        memory."""
        region = super().resolve_tensor(item)
        if not region.is_meta:
            return None
        return Window(region, self._shares.value(region))
