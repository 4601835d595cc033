"""Conversion of weights between a Hugging Face folder, Megatron's parameters, and the
engines.

A rank reads only the layers of its pipeline stage, the experts that it has, and its own
part of a tensor that tensor-parallel ranks divide. To export, the ranks that hold one
copy of the model send their parts to the first of them, bucket by bucket, so that no
process ever holds a second model. Each writes its own parts into the arena
(`arena_staging.py`).

Invariant: weights exported directly after loading equal the loaded ones, byte for byte,
under the same names. Imported after `device.prepare()`.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open

from invrl.errors import TrainError
from invrl.families.hf_config import unfitting_tensors
from invrl.families.model_config import HuggingFaceConfig
from invrl.families.parameter import Parameter, join, split
from invrl.families.registry import FAMILIES
from invrl.interfaces import WeightLayout
from invrl.train.parallel.partitions import chunk_parameters
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.runtime import device
from invrl.types.weights import TensorSpec
from invrl.user_code.model_folder import tensor_files
from invrl.weights.tensors.tensor_slice import TensorPart

BUCKET_BYTES = 64 << 20
"""Bytes that a rank sends at a time, or one parameter if that is larger."""


def parameters(config: HuggingFaceConfig) -> list[Parameter]:
    """Return the model's parameters, in sending order."""
    return FAMILIES[config.model_type].parameters(config)


def load_weights(
    own_parameters: Mapping[str, torch.Tensor],
    config: HuggingFaceConfig,
    folder: str | Path,
) -> None:
    """Fill this rank's parameters, or its parts of them, from the folder's safetensors
    files, cast to the parameter's dtype. Arguments and errors are those of
    `read_weights`."""
    with torch.no_grad():
        for name, tensor in read_weights(own_parameters, config, folder):
            own_parameters[name].copy_(tensor)


def read_weights(
    own_parameters: Mapping[str, torch.Tensor],
    config: HuggingFaceConfig,
    folder: str | Path,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the folder's safetensors data for each of this rank's parameters, or for
    its part of it, in the dtype of the files. `own_parameters` are by name in the whole
    model. A tensor may be a view of the file.

    Raises TrainError unless names and shapes fit exactly, ConfigError for a folder
    without such files.
    """
    table = parameters(config)
    unknown = own_parameters.keys() - {parameter.megatron for parameter in table}
    if unknown:
        raise TrainError(
            f"{config.model_type}: the family file lacks {sorted(unknown)[:5]}"
        )
    files = tensor_files(Path(folder))
    reason = unfitting_tensors(config, files)
    if reason:
        raise TrainError(
            f"{folder}: {reason}. Give a folder whose files belong together"
        )
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    for parameter in table:
        if parameter.megatron not in own_parameters:
            continue  # on another pipeline stage, or another rank's expert
        shape = own_parameters[parameter.megatron].shape
        tensors = [
            _own_part(opened[files[name]], name, parameter.divided_dimension)
            for name in parameter.hugging_face
        ]
        joined = join(parameter.fusion, tensors, groups=_own_groups(config))
        if joined.shape != shape:
            raise TrainError(
                f"{folder}: {parameter.hugging_face} give {tuple(joined.shape)}, "
                f"{parameter.megatron} is {tuple(shape)}"
            )
        yield parameter.megatron, joined


def _own_part(file: Any, name: str, dimension: int | None) -> torch.Tensor:
    """Return a tensor of an open safetensors file: this tensor-parallel rank's part
    along `dimension`, all of it if that is None."""
    if dimension is None:
        return file.get_tensor(name)
    whole = file.get_slice(name)
    part_size = (
        whole.get_shape()[dimension]
        // parallel_state.get_tensor_model_parallel_world_size()
    )
    start = parallel_state.get_tensor_model_parallel_rank() * part_size
    own = slice(start, start + part_size)
    return whole[own] if dimension == 0 else whole[:, own]


def _own_groups(config: HuggingFaceConfig) -> int:
    """Return the number of key-value heads of this tensor-parallel rank."""
    return (
        config.num_key_value_heads
        // parallel_state.get_tensor_model_parallel_world_size()
    )


@dataclass(frozen=True, slots=True)
class _Holding:
    """Ranks of a copy of the model that have a parameter."""

    ranks: tuple[int, ...]
    """Ranks in the order of their parts; one rank if it has all of it."""
    shape: tuple[int, ...]
    """Shape of one rank's part."""


class ReplicaWeights:
    """Weights of one copy of the model, which all its ranks offer together under
    Hugging Face names."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: HuggingFaceConfig,
        layout: ParallelLayout,
    ) -> None:
        """All ranks call it together. Raises TrainError for a parameter that no rank of
        the copy has."""
        self._config = config
        self._table = parameters(config)
        self._own_parameters = chunk_parameters(chunks)
        self._rank = torch.distributed.get_rank()
        self._ranks = layout.model_copy(layout.coordinates(self._rank).data)
        self._holdings = self._exchange_holdings(layout)

    @property
    def collects(self) -> bool:
        """Whether the others send their parts to this rank."""
        return self._rank == self._ranks[0]

    def export(
        self,
        dtype: torch.dtype,
        values: Mapping[str, torch.Tensor] | None = None,
        *,
        names: Collection[str] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, contiguous tensor in `dtype`), in sending order, on
        the rank that collects. On the others it yields nothing but must still be
        exhausted, because they send.

        `values` replaces each parameter by name; untrained ones are then left out.
        None: all of them, unchanged. `names`: Hugging Face names, and nothing else is
        exported. A tensor may be a view of the model's own memory: use it before the
        next training step.
        """
        table = self._table
        if names is not None:
            table = [
                parameter
                for parameter in table
                if not set(names).isdisjoint(parameter.hugging_face)
            ]
        if values is None:
            values = self._own_parameters
        else:
            table = [parameter for parameter in table if parameter.is_trained]
        for bucket in self._buckets(table, dtype):
            bucket_dtype = _exported_dtype(next(iter(bucket.values())), dtype)
            parts: dict[str, list[torch.Tensor]] = {name: [] for name in bucket}
            for holder in self._ranks:
                held = [name for name in bucket if holder in self._holdings[name].ranks]
                for name, part in self._parts(holder, held, values, bucket_dtype):
                    parts[name].append(part)
            if self.collects:
                for name, parameter in bucket.items():
                    tensors = _assemble(parameter, parts[name], self._config)
                    for tensor_name, tensor in tensors:
                        if names is None or tensor_name in names:
                            yield tensor_name, tensor

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of this copy of the model; the first collects."""
        return self._ranks

    def own_parts(self, dtype: torch.dtype) -> Iterator[TensorPart]:
        """Yield this rank's part of each tensor, in `dtype`. The parts of all ranks are
        the model, each element once. Parts are views of the model's memory where
        possible."""
        for parameter in self._table:
            holding = self._holdings[parameter.megatron]
            if self._rank not in holding.ranks:
                continue
            own = self._own_parameters[parameter.megatron].detach()
            converted = own.to(_exported_dtype(parameter, dtype))
            groups = _own_groups(self._config)
            pieces = split(
                parameter.fusion,
                converted,
                groups=groups,
                head_dim=self._config.head_dim,
            )
            dimension = parameter.divided_dimension or 0
            index = holding.ranks.index(self._rank)
            for name, piece in zip(parameter.hugging_face, pieces, strict=True):
                start = index * piece.shape[dimension] if piece.dim() else 0
                yield TensorPart(
                    name=name, values=piece, dimension=dimension, start=start
                )

    def _exchange_holdings(self, layout: ParallelLayout) -> dict[str, _Holding]:
        """Return the holdings by the parameter's name."""
        own_shapes = {
            name: tuple(parameter.shape)
            for name, parameter in self._own_parameters.items()
        }
        shapes_by_rank: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(shapes_by_rank, own_shapes)
        holdings: dict[str, _Holding] = {}
        for parameter in self._table:
            name = parameter.megatron
            holders = [rank for rank in self._ranks if name in shapes_by_rank[rank]]
            if not holders:
                raise TrainError(
                    f"{self._config.model_type}: the family file has {name}, the model does not"
                )
            ranks = holders[:1]
            if parameter.divided_dimension is not None:
                ranks = layout.tensor_group(holders[0])
            holdings[name] = _Holding(tuple(ranks), shapes_by_rank[ranks[0]][name])
        return holdings

    def _buckets(
        self, table: Sequence[Parameter], dtype: torch.dtype
    ) -> Iterator[dict[str, Parameter]]:
        """Yield the parameters in order, by their names, in buckets of one dtype and of
        at most `BUCKET_BYTES` of one rank's parts, or of one parameter."""
        bucket: dict[str, Parameter] = {}
        bucket_bytes = 0
        bucket_dtype = dtype
        for parameter in table:
            own_dtype = _exported_dtype(parameter, dtype)
            num_bytes = (
                math.prod(self._holdings[parameter.megatron].shape) * own_dtype.itemsize
            )
            if bucket and (
                own_dtype != bucket_dtype or bucket_bytes + num_bytes > BUCKET_BYTES
            ):
                yield bucket
                bucket = {}
                bucket_bytes = 0
            bucket[parameter.megatron] = parameter
            bucket_bytes += num_bytes
            bucket_dtype = own_dtype
        yield bucket

    def _parts(
        self,
        holder: int,
        names: Sequence[str],
        values: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the holder's parts of these parameters, on the rank that collects. The
        holder sends them."""
        if not names:
            return
        if holder == self._rank:
            own_parts = {name: values[name].detach().to(dtype) for name in names}
            if self.collects:
                yield from own_parts.items()
            else:
                flat = torch.cat([part.reshape(-1) for part in own_parts.values()])
                torch.distributed.send(flat, self._ranks[0])
        elif self.collects:
            shapes = [self._holdings[name].shape for name in names]
            sizes = [math.prod(shape) for shape in shapes]
            flat = torch.empty(sum(sizes), dtype=dtype, device=device.device())
            torch.distributed.recv(flat, holder)
            for name, shape, part in zip(names, shapes, flat.split(sizes), strict=True):
                yield name, part.view(shape)


def _assemble(
    parameter: Parameter, parts: Sequence[torch.Tensor], config: HuggingFaceConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the Hugging Face tensors of a parameter from its parts, in the order of the
    tensor-parallel ranks."""
    groups = _own_groups(config)
    split_parts = [
        split(parameter.fusion, part, groups=groups, head_dim=config.head_dim)
        for part in parts
    ]
    for name, *pieces in zip(parameter.hugging_face, *split_parts, strict=True):
        if len(pieces) == 1:
            yield name, pieces[0]
        else:
            assert parameter.divided_dimension is not None, (
                f"{parameter.megatron} is on every rank"
            )
            yield name, torch.cat(pieces, dim=parameter.divided_dimension)


def _exported_dtype(parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, unless the parameter has its own."""
    if parameter.dtype is None:
        return dtype
    return getattr(torch, parameter.dtype)


def weight_specs(
    config: HuggingFaceConfig, folder: str | Path, dtype: torch.dtype
) -> WeightLayout:
    """Return the names, shapes and dtypes that `ReplicaWeights.export` yields for the
    model of this folder."""
    files = tensor_files(Path(folder))
    opened = {file: safe_open(file, framework="pt") for file in set(files.values())}
    specs: list[TensorSpec] = []
    for parameter in parameters(config):
        dtype_name = str(_exported_dtype(parameter, dtype)).removeprefix("torch.")
        for name in parameter.hugging_face:
            shape = opened[files[name]].get_slice(name).get_shape()
            specs.append(TensorSpec(name=name, shape=tuple(shape), dtype=dtype_name))
    return tuple(specs)
