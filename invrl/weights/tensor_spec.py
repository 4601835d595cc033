"""A tensor's name, shape, dtype, size and checksum: what every weight transport needs
to know of it.

Imports torch only where tensors are touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from invrl.types.weights import TensorSpec

if TYPE_CHECKING:
    import torch


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype_name = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype_name)


def num_bytes(spec: TensorSpec) -> int:
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def checksum(tensor: torch.Tensor) -> str:
    """Hex xxh3-64 of the tensor's bytes, row-major."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().cpu().view(-1)
    raw_bytes = flat.view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(raw_bytes.data)


def copy_hashed(
    target: torch.Tensor,
    source: torch.Tensor,
    hash_tensor: Callable[[torch.Tensor], str] = checksum,
) -> str:
    """Copies, and returns the checksum of the target's bytes as they are read back
    straight after.

    On a CPU this costs 1.2 to 1.5 times the copy. Blocks of a cache's size did not make
    it faster on the machines that were tried. Raises ValueError for another shape.
    """
    if target.shape != source.shape:
        raise ValueError(
            f"a tensor {tuple(source.shape)} does not fit into {tuple(target.shape)}"
        )
    target.copy_(source.detach())
    return hash_tensor(target)
