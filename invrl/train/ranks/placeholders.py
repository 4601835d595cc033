"""Tensors without memory that stand for tensors in the state dict of a checkpoint.

A placeholder is on torch's meta device. Views of it, and tensors detached from it,
share its storage, by which they are recognised.
"""

from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class Placeholders(Generic[Value]):
    """Flat float32 placeholders, each with a value that says what it stands for."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        self._tensors: list[torch.Tensor] = []
        """Kept alive, because only living storages are sure to have different
        addresses."""

    def clear(self) -> None:
        self._values.clear()
        self._tensors.clear()

    def add(self, numel: int, value: Value) -> torch.Tensor:
        """Return a new placeholder."""
        tensor = torch.empty(numel, dtype=torch.float32, device="meta")
        self._values[storage_key(tensor)] = value
        self._tensors.append(tensor)
        return tensor

    def value(self, view: torch.Tensor) -> Value:
        """Return the value of the placeholder that the tensor is a view of."""
        return self._values[storage_key(view)]

    def values(self) -> list[tuple[int, Value]]:
        """Return (storage of the placeholder, its value), in the order of creation."""
        return list(self._values.items())


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
