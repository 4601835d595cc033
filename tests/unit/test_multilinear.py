"""Checksums that add up: of every cut, dtype and shape, and what damage changes
them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product, starmap

import pytest
import torch

from invrl.errors import LayoutError
from invrl.weights.checksums.multilinear_checksum import (
    SumsInPlace,
    rank_checksums,
    whole_checksums,
)
from invrl.weights.tensors.tensor_slice import TensorSlice

MATRIX = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
SIGN_BIT = -(1 << 31)
"""Of a signed 32-bit word."""


Part = tuple[torch.Tensor, TensorSlice]


def whole_checksum(tensor: torch.Tensor) -> str:
    return whole_checksums({"": tensor})[""]


def slice_checksum(
    part: torch.Tensor, place: TensorSlice, whole_shape: Sequence[int]
) -> str:
    sums = SumsInPlace({"": part}, {"": place}, {"": whole_shape})
    return sums.slice_checksums({"": part})[""]


def cut(
    tensor: torch.Tensor,
    dimension: int,
    count: int,
) -> list[Part]:
    size = tensor.shape[dimension] // count
    parts: list[Part] = []
    for index in range(count):
        start = index * size
        place = TensorSlice(
            dimension=dimension,
            start=start,
            stop=start + size,
            index=index,
            count=count,
        )
        parts.append((place.of(tensor), place))
    return parts


def sum_of_parts(tensor: torch.Tensor, parts: list[Part]) -> str:
    """The checksum that ranks with these parts make together."""
    by_rank = [
        {"weight": slice_checksum(part, place, tensor.shape)} for part, place in parts
    ]
    return rank_checksums(by_rank)["weight"]


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
    values = 100 * torch.randn(shape, generator=generator)
    tensor = values.to(dtype)
    whole = whole_checksum(tensor)
    assert whole_checksum(tensor.clone()) == whole
    num_dimensions = len(shape)
    if shape[-1] == 3:
        num_dimensions -= 1  # no cut divides it
    for dimension in range(min(2, num_dimensions)):
        for count in (1, 2, 4):
            parts = cut(tensor, dimension, count)
            assert sum_of_parts(tensor, parts) == whole
            copies = [(part.clone(), place) for part, place in parts]
            assert sum_of_parts(tensor, copies) == whole


def test_multilinear_checksum_equals_its_definition_in_whole_numbers() -> None:
    """Against whole numbers without a limit, so that wrapping is right."""
    from invrl.weights.checksums.multilinear_checksum import (
        COLUMN_SEED,
        ROW_SEED,
        coefficients,
    )

    words = MATRIX.view(torch.int64)
    rows = coefficients(ROW_SEED, 0, words.shape[0]).tolist()
    columns = coefficients(COLUMN_SEED, 0, words.shape[1]).tolist()
    assert all(number % 2 for number in rows + columns)
    total = 0
    for line, row in zip(words.tolist(), rows, strict=True):
        for word, column in zip(line, columns, strict=True):
            mixed = word ^ (word % 2**64 >> 29)
            total += mixed * row * column
    assert whole_checksum(MATRIX) == f"{total % 2**64:016x}"


def with_flipped_bit(row: int, column: int, bit: int) -> torch.Tensor:
    damaged = MATRIX.clone()
    words = damaged.view(torch.int32)
    words[row, column] ^= SIGN_BIT if bit == 31 else 1 << bit
    return damaged


def with_flipped_signs(columns: list[int]) -> torch.Tensor:
    damaged = MATRIX.clone()
    damaged[7, columns] *= -1
    return damaged


def test_every_damage_changes_the_checksum() -> None:
    rows = (0, 11, 23)
    columns = (0, 1, 47)
    bits = (0, 31)
    damages = [
        *starmap(with_flipped_bit, product(rows, columns, bits)),
        MATRIX.roll(1, 0),
        MATRIX.roll(1, 1),
        MATRIX.roll(24, 1),
        MATRIX.flip(0),
        with_flipped_signs([0, 1]),
        with_flipped_signs([1, 3]),
        with_flipped_signs([1, 2, 3, 5]),
        -MATRIX,
        (~MATRIX.view(torch.int32)).view(torch.float32),
    ]
    checksums = {whole_checksum(MATRIX)}
    for damaged in damages:
        checksums.add(whole_checksum(damaged.contiguous()))
    assert len(damages) == 27
    assert len(checksums) == 28


def test_sign_of_a_bfloat16_matrix_changes_its_checksum() -> None:
    half = MATRIX.to(torch.bfloat16)
    assert whole_checksum(half) != whole_checksum(-half)


def by_name(part: torch.Tensor, place: TensorSlice) -> dict[str, str]:
    """What a rank says of its slice of the matrix."""
    return {"weight": slice_checksum(part, place, MATRIX.shape)}


def test_wrong_slice_in_one_rank_is_named() -> None:
    first_part, second_part = cut(MATRIX, 0, 2)
    first = by_name(*first_part)
    second = by_name(*second_part)
    # rank 1 holds the slice of rank 0
    wrong = by_name(first_part[0], second_part[1])
    whole = whole_checksum(MATRIX)
    right = rank_checksums([first, second])
    assert right == {"weight": whole}
    assert rank_checksums([first, wrong])["weight"] != whole
    for by_rank, reason in (
        ([first, first], "the ranks hold the slices 0/2 only"),
        ([first, {}], "rank 1 has no checksum"),
        ([first, second, wrong], "rank 2 holds another slice 1/2"),
    ):
        checksum = rank_checksums(by_rank)["weight"]
        assert reason in checksum


def test_slice_that_cuts_a_64_bit_word_is_refused() -> None:
    tensor = torch.zeros(4, 12, dtype=torch.bfloat16)
    parts = cut(tensor, 1, 2)
    with pytest.raises(LayoutError, match="within a word"):
        sum_of_parts(tensor, parts)
