"""A rank reads of a saved tensor what it holds, however the tensor was divided."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from invrl.train.ranks.checkpoint_reader import OwnShare, Window
from invrl.train.ranks.placeholders import Placeholders

ROWS = 6
COLUMNS = 4
WHOLE = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
Region = tuple[slice, slice]
EVERYTHING = slice(None)
BY_ROWS: list[Region] = [(slice(0, 1), EVERYTHING), (slice(1, 6), EVERYTHING)]
BY_COLUMNS: list[Region] = [(EVERYTHING, slice(0, 3)), (EVERYTHING, slice(3, 4))]
BLOCKS: list[Region] = [
    (rows, columns)
    for rows in (slice(0, 4), slice(4, 6))
    for columns in (slice(0, 2), slice(2, 4))
]


def read(share: OwnShare, regions: list[Region]) -> int:
    """Fill the share from saved regions. Return how many of them were read."""
    shares = Placeholders[OwnShare]()
    placeholder = shares.add(WHOLE.numel(), share).view(ROWS, COLUMNS)
    num_read = 0
    for rows, columns in regions:
        region = placeholder[rows, columns].detach()
        window = Window(region, shares.value(region))
        if not window.has_own:
            continue
        num_read += 1
        buffer = window.buffer()
        window.in_region(buffer).copy_(WHOLE[rows, columns])
        window.write_back(buffer)
    return num_read


@pytest.mark.parametrize("regions", [BY_ROWS, BY_COLUMNS, BLOCKS])
@pytest.mark.parametrize("cuts", [[0, 24], [0, 5, 24], [0, 3, 9, 23, 24]])
def test_shares_together_have_the_whole_tensor(
    regions: list[Region], cuts: list[int]
) -> None:
    parts: list[torch.Tensor] = []
    for start, end in pairwise(cuts):
        part = torch.full((end - start,), -1.0)
        read(OwnShare(start, part), regions)
        parts.append(part)
    assert torch.equal(torch.cat(parts).view(ROWS, COLUMNS), WHOLE)


@pytest.mark.parametrize(
    ("start", "length", "regions", "num_read"),
    [
        (4, 20, BY_ROWS, 1),
        (3, 1, BY_ROWS, 1),
        (3, 2, BY_ROWS, 2),
        (0, 0, BY_ROWS, 0),
        (0, 0, BY_COLUMNS, 0),
    ],
)
def test_tensors_of_other_ranks_are_not_read(
    start: int, length: int, regions: list[Region], num_read: int
) -> None:
    share = OwnShare(start, torch.zeros(length))
    assert read(share, regions) == num_read
