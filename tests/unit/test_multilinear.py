"""Checksums that add up: of every cut, dtype and shape, and what damage changes
them."""

from __future__ import annotations

import itertools

import pytest
import torch

from invrl.errors import LayoutError
from invrl.weights.multilinear import (
    rank_checksums,
    slice_checksum,
    whole_checksum,
)
from invrl.weights.tensor_slice import TensorSlice

MATRIX = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))


def cut(
    tensor: torch.Tensor, dimension: int, count: int
) -> list[tuple[torch.Tensor, TensorSlice]]:
    size = tensor.shape[dimension] // count
    slices = [
        TensorSlice(
            dimension=dimension,
            start=i * size,
            stop=(i + 1) * size,
            index=i,
            count=count,
        )
        for i in range(count)
    ]
    return [(place.of(tensor), place) for place in slices]


def added(tensor: torch.Tensor, parts: list[tuple[torch.Tensor, TensorSlice]]) -> str:
    by_rank = [
        {"x": slice_checksum(part, place, tensor.shape)} for part, place in parts
    ]
    return rank_checksums(by_rank)["x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    "shape",
    [
        (24, 64),
        (32,),
        (8, 16, 4),
        (8, 3),
    ],
)
def test_checksums_of_slices_add_up_to_the_checksum_of_the_whole(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = (100 * torch.randn(shape, generator=generator)).to(dtype)
    whole = whole_checksum(tensor)
    for dimension in range(min(2, len(shape) - (shape[-1] == 3))):
        for count in (1, 2, 4):
            parts = cut(tensor, dimension, count)
            assert added(tensor, parts) == whole
            copies = [(part.clone(), place) for part, place in parts]
            assert added(tensor, copies) == whole
    assert whole_checksum(tensor.clone()) == whole


def test_multilinear_checksum_equals_its_definition_in_whole_numbers() -> None:
    """Against whole numbers without a limit, so that wrapping is right."""
    from invrl.weights.multilinear import COLUMN_SEED, ROW_SEED, coefficients

    words = MATRIX.view(torch.int64)
    rows = coefficients(ROW_SEED, 0, words.shape[0]).tolist()
    columns = coefficients(COLUMN_SEED, 0, words.shape[1]).tolist()
    assert all(number % 2 for number in rows + columns)
    total = sum(
        (word ^ (word % 2**64 >> 29)) * rows[row] * columns[column]
        for row, line in enumerate(words.tolist())
        for column, word in enumerate(line)
    )
    assert whole_checksum(MATRIX) == f"{total % 2**64:016x}"


def test_every_damage_changes_the_checksum() -> None:
    seen = {whole_checksum(MATRIX)}
    for row, column, bit in itertools.product((0, 11, 23), (0, 1, 47), (0, 31)):
        damaged = MATRIX.clone()
        damaged.view(torch.int32)[row, column] ^= 1 << bit if bit < 31 else -(1 << 31)
        seen.add(whole_checksum(damaged))
    for moved in (
        MATRIX.roll(1, 0),
        MATRIX.roll(1, 1),
        MATRIX.flip(0),
        MATRIX.roll(24, 1),
    ):
        seen.add(whole_checksum(moved.contiguous()))
    for signs in ((0, 1), (1, 3), (1, 2, 3, 5)):
        damaged = MATRIX.clone()
        damaged[7, list(signs)] *= -1
        seen.add(whole_checksum(damaged))
    seen.add(whole_checksum(-MATRIX))
    half = MATRIX.to(torch.bfloat16)
    assert whole_checksum(half) != whole_checksum(-half)
    seen.add(whole_checksum((~MATRIX.view(torch.int32)).view(torch.float32)))
    assert len(seen) == 1 + 18 + 4 + 5


def test_wrong_slice_in_one_rank_is_named() -> None:
    whole = whole_checksum(MATRIX)
    (first, first_place), (second, second_place) = cut(MATRIX, 0, 2)
    right = [{"x": slice_checksum(first, first_place, MATRIX.shape)}]
    # rank 1 holds the slice of rank 0
    wrong = slice_checksum(first, second_place, MATRIX.shape)
    assert rank_checksums([*right, {"x": wrong}])["x"] != whole
    right.append({"x": slice_checksum(second, second_place, MATRIX.shape)})
    assert rank_checksums(right) == {"x": whole}
    for by_rank, reason in (
        ([right[0], right[0]], "the ranks hold the slices 0/2 only"),
        ([right[0], {}], "rank 1 has no checksum"),
        ([*right, {"x": wrong}], "rank 2 holds another slice 1/2"),
    ):
        assert reason in rank_checksums(by_rank)["x"]


def test_slice_that_cuts_a_64_bit_word_is_refused() -> None:
    tensor = torch.zeros(4, 12, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="within a word"):
        added(tensor, cut(tensor, 1, 2))
