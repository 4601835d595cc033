"""An additive checksum: a tensor's checksum is the sum of those of its slices, wherever
it is cut.

It is the multilinear hash. A tensor is a matrix of machine words, and its checksum the
sum modulo 2**64 of each word times the coefficients of its row and of its column.
Coefficients are odd numbers without a pattern, so one changed word always changes the
sum. The upper bits of a word are first mixed into the lower ones: a product carries
upwards only, and two changed signs could cancel. It is computed where the tensor is: on
a GPU by one kernel for all tensors (`gpu_checksums.py`), and nothing but the sums is
copied to the host.

The ranks of an engine hash their slices with it. Where an engine holds whole tensors in
the CPU's memory, xxh3 (`tensor_spec.checksum`) takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self

from invrl.errors import LayoutError
from invrl.weights.tensors.tensor_slice import TensorSlice

if TYPE_CHECKING:
    import torch

    from invrl.weights.checksums.gpu_checksums import Tiles
    from invrl.weights.tensors.tensor_spec import Checksums, Tensors

_WORD = 8
_WRAP = (1 << 64) - 1
SHIFT = 29
"""Not a multiple of a weight's bits: the signs of a word's weights move to places where
they cannot cancel."""
_AFTER_SHIFT = (1 << (64 - SHIFT)) - 1
_BLOCK_BYTES = 1 << 19
"""Bytes mixed and multiplied at a time: as many as fit into a core's cache."""
_ONLY_SLICE = "0/1:"
"""Before the sum of a whole tensor."""
ROW_SEED = 1
COLUMN_SEED = 2


def whole_checksums(tensors: Tensors) -> Checksums:
    """Return the checksum of each tensor as 16 hex digits, by name."""
    return SumsInPlace.of_wholes(tensors).whole_checksums(tensors)


class SumsInPlace:
    """Checksums of the same tensors, computed once or repeatedly. Where their words lie is worked
    out once if they are on a GPU: that takes longer than their sums."""

    def __init__(
        self,
        parts: Tensors,
        places: Mapping[str, TensorSlice],
        whole_shapes: Mapping[str, Sequence[int]],
    ) -> None:
        self._parts = dict(parts)
        self._places = places
        self._whole_shapes = whole_shapes
        self._tiles: Tiles | None = None
        """Tiles of all parts, from the first call that hashes all of them on a GPU."""

    @classmethod
    def of_wholes(cls, tensors: Tensors) -> Self:
        places: dict[str, TensorSlice] = {}
        shapes: dict[str, Sequence[int]] = {}
        for name, tensor in tensors.items():
            shapes[name] = tuple(tensor.shape)
            places[name] = TensorSlice.whole(tensor.shape)
        return cls(tensors, places, shapes)

    def whole_checksums(self, tensors: Tensors) -> Checksums:
        """Return the checksums of whole tensors. `tensors`: those that are known, or
        any others with their names."""
        checksums: Checksums = {}
        for name, total in zip(tensors, self._sums(tensors), strict=True):
            checksums[name] = f"{total:016x}"
        return checksums

    def slice_checksums(self, tensors: Tensors) -> Checksums:
        """Return the checksums of slices, for `rank_checksums`. Raises LayoutError if a
        cut is not between two words."""
        checksums: Checksums = {}
        for name, total in zip(tensors, self._sums(tensors), strict=True):
            place = self._places[name]
            checksums[name] = f"{place.index}/{place.count}:{total:016x}"
        return checksums

    def _sums(self, tensors: Tensors) -> list[int]:
        if self._are_the_parts(tensors) and _are_on_gpu(tensors):
            if self._tiles is None:
                self._tiles = self._tiles_in_place()
            if self._tiles is not None:
                return self._sums_of_tiles(self._tiles, tensors)
        matrices: list[WordMatrix] = []
        for name, tensor in tensors.items():
            matrices.append(self._matrix(name, tensor))
        return _sums(matrices)

    def _are_the_parts(self, tensors: Tensors) -> bool:
        if len(tensors) != len(self._parts):
            return False
        parts = self._parts.items()
        return all(tensors.get(name) is part for name, part in parts)

    def _sums_of_tiles(self, tiles: Tiles, names: Iterable[str]) -> list[int]:
        from invrl.weights.checksums.gpu_checksums import sums_on_gpu

        values = sums_on_gpu(tiles)
        sums = dict(zip(self._parts, values, strict=True))
        return [sums[name] & _WRAP for name in names]

    def _matrix(self, name: str, tensor: torch.Tensor) -> WordMatrix:
        shape = tuple(self._whole_shapes[name])
        return _slice_matrix(tensor, self._places[name], shape)

    def _tiles_in_place(self) -> Tiles | None:
        """None if a part is read from a copy, which would not follow its changes."""
        from invrl.weights.checksums.gpu_checksums import split_in_tiles

        matrices: list[WordMatrix] = []
        for name, part in self._parts.items():
            matrix = self._matrix(name, part)
            if matrix.part.data_ptr() != part.data_ptr():
                return None
            matrices.append(matrix)
        return split_in_tiles(matrices)


def _are_on_gpu(tensors: Tensors) -> bool:
    if not tensors:
        return False
    return all(tensor.is_cuda for tensor in tensors.values())


def rank_checksums(by_rank: Sequence[Mapping[str, str]]) -> Checksums:
    """Return the checksum of each whole tensor from the slices that an engine's ranks
    hold. Ranks that hold the same slice must agree, and together they must hold every
    slice: otherwise the text describes the error, and equals no checksum."""
    names = dict.fromkeys(name for checksums in by_rank for name in checksums)
    added: Checksums = {}
    for name in names:
        slices = [checksums.get(name, "") for checksums in by_rank]
        added[name] = _added(slices)
    return added


def _added(slices: Sequence[str]) -> str:
    """Return the sum of the ranks' different slices."""
    first = slices[0]
    if len(slices) == 1 and first.startswith(_ONLY_SLICE):
        return first.removeprefix(_ONLY_SLICE)
    values: Checksums = {}
    for rank, text in enumerate(slices):
        place, _, value = text.partition(":")
        if not value:
            return f"rank {rank} has no checksum"
        if values.setdefault(place, value) != value:
            return f"rank {rank} holds another slice {place} than a rank before it"
    counts = {place.partition("/")[2] for place in values}
    if counts != {str(len(values))}:
        return f"the ranks hold the slices {', '.join(values)} only"
    return f"{sum(int(value, 16) for value in values.values()) & _WRAP:016x}"


@dataclass(frozen=True, slots=True, eq=False)
class WordMatrix:
    """Words of a tensor's slice as a matrix, and its place in the whole tensor's
    matrix."""

    part: torch.Tensor
    """Slice, contiguous and aligned to its words."""
    word_bytes: int
    """8, or the bytes of an element if a row is not a whole number of 8-byte words."""
    columns: int
    """Words in a row."""
    first_row: int
    first_column: int

    @property
    def num_words(self) -> int:
        return self.part.nbytes // self.word_bytes

    @property
    def words(self) -> torch.Tensor:
        """Words as integers [rows, columns]."""
        import torch

        dtypes = {
            1: torch.int8,
            2: torch.int16,
            4: torch.int32,
            8: torch.int64,
        }
        dtype = dtypes[self.word_bytes]
        flat = self.part.reshape(-1).view(dtype)
        return flat.view(-1, self.columns)


def _sums(matrices: Sequence[WordMatrix]) -> list[int]:
    """Return the sum of each matrix. Those on a GPU are summed in one kernel, with one
    wait."""
    on_gpu = [matrix for matrix in matrices if matrix.part.is_cuda]
    sums_of_gpu: Iterator[int] = iter(())
    if on_gpu:
        from invrl.weights.checksums.gpu_checksums import split_in_tiles, sums_on_gpu

        tiles = split_in_tiles(on_gpu)
        sums_of_gpu = iter(sums_on_gpu(tiles))
    sums: list[int] = []
    for matrix in matrices:
        if matrix.part.is_cuda:
            total = next(sums_of_gpu)
        else:
            total = _sum_on_cpu(matrix)
        sums.append(total & _WRAP)
    return sums


def _slice_matrix(
    part: torch.Tensor,
    place: TensorSlice,
    whole_shape: tuple[int, ...],
) -> WordMatrix:
    """Return the matrix of a slice. Raises LayoutError if the slice begins or ends
    within a word."""
    import torch

    position = _position(place, whole_shape)
    first_column = position.first_column
    columns = position.columns
    part = part.detach()
    item = part.element_size()
    word_bytes = item
    # A tensor of one dimension is one row.
    row_shape = whole_shape
    if len(whole_shape) > 1:
        row_shape = whole_shape[1:]
    row_bytes = item * math.prod(row_shape)
    if row_bytes % _WORD == 0:
        first_byte = first_column * item
        num_bytes = columns * item
        if first_byte % _WORD or num_bytes % _WORD:
            reason = f"{place} of a tensor {whole_shape} begins or ends within a word of {_WORD} bytes"
            raise LayoutError(f"the engine's ranks cannot prove their slices: {reason}")
        word_bytes = _WORD
        first_column = first_byte // _WORD
        columns = num_bytes // _WORD
    is_aligned = (
        part.data_ptr() % word_bytes == 0
        and part.storage_offset() * item % word_bytes == 0
    )
    if not (part.is_contiguous() and is_aligned):
        part = part.clone(memory_format=torch.contiguous_format)
    return WordMatrix(
        part=part,
        word_bytes=word_bytes,
        columns=columns,
        first_row=position.first_row,
        first_column=first_column,
    )


def _sum_on_cpu(matrix: WordMatrix) -> int:
    if matrix.num_words == 0:
        return 0
    words = matrix.words
    num_rows, num_columns = words.shape
    of_columns = coefficients(COLUMN_SEED, matrix.first_column, num_columns)
    of_rows = coefficients(ROW_SEED, matrix.first_row, num_rows)
    row_sums = _row_sums(words, of_columns)
    return int((row_sums * of_rows).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """A slice in the matrix of its tensor, in elements."""

    first_row: int
    first_column: int
    columns: int


def _position(place: TensorSlice, whole_shape: tuple[int, ...]) -> _Position:
    """Return the slice's position in the tensor's matrix, whose rows are those of the
    tensor. A tensor of one dimension is one row."""
    length = place.stop - place.start
    if len(whole_shape) < 2:
        return _Position(
            first_row=0,
            first_column=place.start,
            columns=max(1, length),
        )
    if place.dimension == 0:
        return _Position(
            first_row=place.start,
            first_column=0,
            columns=math.prod(whole_shape[1:]),
        )
    step = math.prod(whole_shape[2:])
    return _Position(
        first_row=0,
        first_column=place.start * step,
        columns=length * step,
    )


def _row_sums(
    words: torch.Tensor,
    column_coefficients: torch.Tensor,
) -> torch.Tensor:
    import torch

    num_rows, num_columns = words.shape
    block_rows = max(1, _BLOCK_BYTES // (_WORD * num_columns))
    block_rows = min(num_rows, block_rows)
    memory = torch.empty(block_rows, num_columns, dtype=torch.int64)
    sums: list[torch.Tensor] = []
    for block in words.split(block_rows):
        mixed = memory[: len(block)]
        if words.dtype == torch.int64:
            torch.bitwise_right_shift(block, SHIFT, out=mixed)
            mixed.bitwise_and_(_AFTER_SHIFT).bitwise_xor_(block)
        else:
            mixed.copy_(block)
        sums.append(torch.mv(mixed, column_coefficients))
    return torch.cat(sums)


def coefficients(seed: int, start: int, count: int) -> torch.Tensor:
    """Return the coefficients of the rows or columns from `start` on: int64 [count]."""
    stop = start + count
    size = 1 << (stop - 1).bit_length()
    return _table(seed, size)[start:stop]


@lru_cache(maxsize=64)
def _table(seed: int, size: int) -> torch.Tensor:
    """Return odd int64 numbers by their index (splitmix64)."""
    import torch

    with torch.inference_mode(mode=False):
        first = seed << 40
        mixed = torch.arange(first, first + size, dtype=torch.int64)
        mixed = mixed * _signed(0x9E3779B97F4A7C15)
        mixed = _xor_shift(mixed, 30) * _signed(0xBF58476D1CE4E5B9)
        mixed = _xor_shift(mixed, 27) * _signed(0x94D049BB133111EB)
        return _xor_shift(mixed, 31) | 1


def _xor_shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Compute `values ^ (values >> bits)` of unsigned numbers."""
    without_sign = (1 << (64 - bits)) - 1
    return values ^ ((values >> bits) & without_sign)


def _signed(value: int) -> int:
    return value - (1 << 64)
