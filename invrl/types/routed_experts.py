"""Experts of a model that computed a token, as one row of numbers per layer."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

RoutedExperts = NDArray[np.unsignedinteger[Any]]
"""[T, layers, K]: for each token the K experts that computed it in each layer of the
model; zeros for a layer without experts. The largest number of the dtype stands for
experts that are unknown."""


def experts_dtype(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest dtype with a number for each expert of a layer, and one for
    unknown experts."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def unknown_expert(dtype: np.dtype[np.unsignedinteger[Any]]) -> int:
    """Return the number that stands for unknown experts."""
    return int(np.iinfo(dtype).max)
