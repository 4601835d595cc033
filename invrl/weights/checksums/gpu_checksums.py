"""The sums of `multilinear_checksum.py` for many tensors in one kernel: GPU time
depends on bytes, not on the number of tensors.

Each program of the kernel sums one tile, a run of words of one tensor, and adds the
result to the tensor's sum. It computes the coefficients of its words itself, so nothing
but the words is read from memory. Addition modulo 2**64 gives the same number in every
order.

Imports triton, which comes with torch's builds for CUDA: import this module where there
is such a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from invrl.weights.checksums.multilinear_checksum import (
    COLUMN_SEED,
    ROW_SEED,
    SHIFT,
    WordMatrix,
)

_COLUMN_SEED = tl.constexpr(COLUMN_SEED)
_ROW_SEED = tl.constexpr(ROW_SEED)
_SHIFT = tl.constexpr(SHIFT)
_TILE_WORDS = tl.constexpr(16_384)
"""128 KiB of whole words: several thousand tiles for a gigabyte, which occupy every
multiprocessor."""
_BLOCK_WORDS = tl.constexpr(1024)
"""Words that a program holds in registers at a time."""
_TILE_FIELDS = tl.constexpr(7)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Places of the words of matrices. It keeps none of their memory."""

    num_sums: int
    by_word_bytes: Sequence[tuple[int, torch.Tensor]]
    """The size of a word, and the tiles with such words: on the GPU, a row for each."""
    device: torch.device


def split_in_tiles(matrices: Sequence[WordMatrix]) -> Tiles:
    """`matrices`: all on one GPU."""
    device = matrices[0].part.device
    by_size: dict[int, list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_size.setdefault(matrix.word_bytes, []).append(index)
    by_word_bytes: list[tuple[int, torch.Tensor]] = []
    for word_bytes, indices in by_size.items():
        rows = _rows([matrices[index] for index in indices], indices)
        if len(rows):
            by_word_bytes.append((word_bytes, torch.from_numpy(rows).to(device)))
    return Tiles(len(matrices), by_word_bytes, device)


def sums_on_gpu(tiles: Tiles) -> list[int]:
    """The sum of each matrix, of the words as they are now. Waits for the result, and
    so for all that the current stream was asked for before."""
    sums = torch.zeros(tiles.num_sums, dtype=torch.int64, device=tiles.device)
    with torch.cuda.device_of(sums):  # triton launches on the current device
        for word_bytes, rows in tiles.by_word_bytes:
            _add_tiles[(len(rows),)](rows, sums, WORD_BYTES=word_bytes)  # type: ignore[arg-type]
    return sums.tolist()


def _rows(matrices: Sequence[WordMatrix], indices: Sequence[int]) -> NDArray[np.int64]:
    """Return a row for each tile: address of its first word, number of words, columns
    of its matrix, column in the slice, row and first column in the whole tensor, and
    index of the sum."""
    sizes = np.array([matrix.num_words for matrix in matrices], np.int64)
    counts = -(-sizes // _TILE_WORDS.value)
    owner = np.repeat(np.arange(len(matrices)), counts)
    start = (
        np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    ) * _TILE_WORDS.value
    facts = np.array(
        [
            (
                matrix.part.data_ptr(),
                matrix.columns,
                matrix.first_row,
                matrix.first_column,
                matrix.word_bytes,
                index,
            )
            for matrix, index in zip(matrices, indices, strict=True)
        ],
        np.int64,
    )
    address, columns, first_row, first_column, word_bytes, index = facts[owner].T
    return np.stack(
        [
            address + start * word_bytes,
            np.minimum(sizes[owner] - start, _TILE_WORDS.value),
            columns,
            start % columns,
            first_row + start // columns,
            first_column,
            index,
        ],
        axis=1,
    )


@triton.jit
def _coefficients(seed: tl.constexpr, index):
    """Compute `multilinear_checksum.coefficients` on the GPU."""
    mixed = (index + (seed << 40)).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return ((mixed ^ (mixed >> 31)) | 1).to(tl.int64)


@triton.jit
def _add_tiles(tiles, sums, WORD_BYTES: tl.constexpr):
    tile = tiles + tl.program_id(0).to(tl.int64) * _TILE_FIELDS
    address = tl.load(tile)
    count = tl.load(tile + 1).to(tl.int32)
    columns = tl.load(tile + 2).to(tl.int32)
    column = tl.load(tile + 3).to(tl.int32)
    row = tl.load(tile + 4)
    first_column = tl.load(tile + 5)
    index = tl.load(tile + 6)
    total = tl.zeros((_BLOCK_WORDS,), tl.int64)
    for start in range(0, _TILE_WORDS, _BLOCK_WORDS):
        place = start + tl.arange(0, _BLOCK_WORDS)
        if WORD_BYTES == 8:
            whole = tl.load(
                address.to(tl.pointer_type(tl.int64)) + place, place < count, other=0
            )
            words = whole ^ (whole.to(tl.uint64) >> _SHIFT).to(tl.int64)
        elif WORD_BYTES == 4:
            words = tl.load(
                address.to(tl.pointer_type(tl.int32)) + place, place < count, other=0
            )
        elif WORD_BYTES == 2:
            words = tl.load(
                address.to(tl.pointer_type(tl.int16)) + place, place < count, other=0
            )
        else:
            words = tl.load(
                address.to(tl.pointer_type(tl.int8)) + place, place < count, other=0
            )
        rows = row + (column + place) // columns
        in_row = first_column + (column + place) % columns
        total += (
            words.to(tl.int64)
            * _coefficients(_COLUMN_SEED, in_row)
            * _coefficients(_ROW_SEED, rows)
        )
    tl.atomic_add(sums + index, tl.sum(total), sem="relaxed")
