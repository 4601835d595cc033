"""The slice of each checkpoint tensor that one rank of an engine holds, as SGLang
divides a model.

A matrix is divided by its rows or by its columns, an embedding by the rows of the
padded vocabulary, and fused parameters part by part. Keys and values have fewer heads
than there are ranks in some models: then several ranks hold the same head. Undivided
tensors are whole on every rank. The shape of the rank's parameter tells these cases
apart. On a CPU SGLang gives such models more heads instead, which are zeros; this
module does not support that division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import LayoutError
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.engine_parameters import is_padded, padded_rows

if TYPE_CHECKING:
    import torch


class EngineRank(msgspec.Struct, frozen=True, kw_only=True):
    """One of the processes that share an engine's model."""

    index: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """Range `start` to `stop` of a dimension: the `index`-th of `count` different
    slices."""

    dimension: int
    start: int
    stop: int
    index: int
    count: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        length = shape[0] if shape else 1
        return cls(
            dimension=0,
            start=0,
            stop=length,
            index=0,
            count=1,
        )

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of a whole tensor, as a view."""
        if self.is_whole:
            return tensor
        return tensor.narrow(self.dimension, self.start, self.stop - self.start)

    def make_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the slice's name, shape and dtype."""
        if self.is_whole:
            return spec
        shape = list(spec.shape)
        shape[self.dimension] = self.stop - self.start
        return TensorSpec(name=spec.name, shape=tuple(shape), dtype=spec.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Part of a checkpoint tensor that one trainer rank holds: `values` begin at
    `start` of the dimension."""

    name: str
    values: torch.Tensor
    dimension: int = 0
    start: int = 0


def rank_slices(
    parameter: str, shape: Sequence[int], specs: Sequence[TensorSpec], rank: EngineRank
) -> Mapping[str, TensorSlice]:
    """Return the slices that a parameter of this shape holds on this rank, by tensor.

    Raises LayoutError if no division gives this shape.
    """
    whole = {spec.name: TensorSlice.whole(spec.shape) for spec in specs}
    if (
        rank.size == 1
        or not shape
        or any(len(spec.shape) != len(shape) for spec in specs)
    ):
        return whole
    rows = [spec.shape[0] for spec in specs]
    if is_padded(parameter):
        if shape[0] >= padded_rows(parameter, rows[0]):
            return whole
        return {specs[0].name: _vocabulary_slice(shape[0], rows[0], rank)}
    if shape[0] == sum(rows) and len(specs) < 3:
        if len(shape) == 1 or shape[1] == specs[0].shape[1]:
            return whole
        return {
            spec.name: _even_slice(parameter, 1, spec.shape[1], rank) for spec in specs
        }
    if shape[0] * rank.size == sum(rows):
        return {
            spec.name: _even_slice(parameter, 0, spec.shape[0], rank) for spec in specs
        }
    if len(specs) == 3:
        return _shared_head_slices(parameter, shape[0], specs, rank)
    raise _indivisible(parameter, f"{shape[0]} of {sum(rows)} rows", rank)


def _vocabulary_slice(rows_per_rank: int, rows: int, rank: EngineRank) -> TensorSlice:
    """Return a rank's slice of the vocabulary. The last rank's rows end with padding,
    which belongs to no token."""
    start = min(rank.index * rows_per_rank, rows)
    stop = min(start + rows_per_rank, rows)
    count = -(-rows // rows_per_rank)
    return TensorSlice(
        dimension=0,
        start=start,
        stop=stop,
        index=rank.index,
        count=count,
    )


def _even_slice(
    parameter: str, dimension: int, length: int, rank: EngineRank
) -> TensorSlice:
    return _nth_slice(parameter, dimension, length, rank.index, rank.size, rank)


def _shared_head_slices(
    parameter: str, rows_of_rank: int, specs: Sequence[TensorSpec], rank: EngineRank
) -> Mapping[str, TensorSlice]:
    """Return the slices of queries, keys and values if several ranks hold the same key
    and value head."""
    query, key, value = specs
    query_slice = _even_slice(parameter, 0, query.shape[0], rank)
    head_rows, remainder = divmod(
        rows_of_rank - (query_slice.stop - query_slice.start), 2
    )
    fits = (
        head_rows > 0
        and remainder == 0
        and key.shape == value.shape
        and key.shape[0] % head_rows == 0
    )
    heads = key.shape[0] // head_rows if fits else 0
    if heads == 0 or rank.size % heads:
        total = sum(spec.shape[0] for spec in specs)
        raise _indivisible(parameter, f"{rows_of_rank} of {total} rows", rank)
    ranks_per_head = rank.size // heads
    head = _nth_slice(
        parameter, 0, key.shape[0], rank.index // ranks_per_head, heads, rank
    )
    return {query.name: query_slice, key.name: head, value.name: head}


def _nth_slice(
    parameter: str,
    dimension: int,
    length: int,
    index: int,
    count: int,
    rank: EngineRank,
) -> TensorSlice:
    size, remainder = divmod(length, count)
    if remainder:
        raise _indivisible(parameter, f"a tensor's dimension of {length}", rank)
    start = index * size
    return TensorSlice(
        dimension=dimension,
        start=start,
        stop=start + size,
        index=index,
        count=count,
    )


def _indivisible(parameter: str, held: str, rank: EngineRank) -> LayoutError:
    return LayoutError(
        f"{parameter}: rank {rank.index} of the engine's {rank.size} holds {held}, which is no known division"
    )
