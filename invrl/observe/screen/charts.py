"""Curves as text, for terminals. Pure.

Values that are not finite are left out. If there are more values than columns, each
column is a mean.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = len(BLOCKS) - 1


def downsample(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: each the mean of equally many, in order."""
    finite = [value for value in values if math.isfinite(value)]
    if width <= 0:
        return []
    if len(finite) <= width:
        return finite
    edges = [number * len(finite) // width for number in range(width + 1)]
    return [math.fsum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw one row, at most `width` letters wide. The lowest value gets the lowest
    visible letter."""
    columns = downsample(values, width)
    if not columns:
        return ""
    low, high = min(columns), max(columns)
    letters: list[str] = []
    for value in columns:
        share = 0.5 if high == low else (value - low) / (high - low)
        letters.append(BLOCKS[1 + round(share * (_EIGHTHS - 1))])
    return "".join(letters)


def block_chart(
    values: Sequence[float],
    width: int,
    height: int,
    *,
    low: float,
    high: float,
) -> list[str]:
    """Draw bars from `low` to each value, as rows from top to bottom. A value at `low`
    still shows a line. `width`: of the chart; fewer values make wider bars."""
    columns = downsample(values, width)
    if not columns or height <= 0:
        return []
    repeat = max(1, min(4, width // len(columns)))
    span = (high - low) or 1.0
    filled: list[int] = []
    for value in columns:
        share = min(1.0, max(0.0, (value - low) / span))
        filled.append(max(1, round(share * height * _EIGHTHS)))
    rows: list[str] = []
    for row in range(height - 1, -1, -1):
        letters = [
            BLOCKS[min(_EIGHTHS, max(0, amount - row * _EIGHTHS))] for amount in filled
        ]
        rows.append("".join(letter * repeat for letter in letters))
    return rows
