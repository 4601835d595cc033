"""Many linear layers of one shape, each over its own rows, as one grouped matrix
product.

`torch.nn.functional.grouped_mm` chooses the implementation: in bfloat16 on GPUs of
compute capability 9.0 and 10.0 one kernel, elsewhere one product for each group. A
group may have any number of rows, including none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import grouped_mm

_ALIGNMENT = 16
"""Alignment in bytes of the matrices and rows that `grouped_mm` takes."""


def supports_num_rows(length: int, dtype: torch.dtype) -> bool:
    """Whether inputs and outputs of `grouped_linear` may have this length."""
    return length * dtype.itemsize % _ALIGNMENT == 0


def grouped_linear(
    rows_PI: torch.Tensor, sizes_E: Sequence[int], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return [P, O]: each row times the transposed weight of its group.

    `sizes_E` are the numbers of rows of the groups, which follow each other. `weights`
    has one [O, I] for each group. Each gets a gradient, 0 where its group has no rows.
    A frozen weight gets none. `supports_num_rows` checks I and O.
    """
    return _GroupedLinear.apply(rows_PI, sizes_E, *weights)


class _GroupedLinear(torch.autograd.Function):
    """Keeps the weights themselves for the backward pass, not a stack, which might be a
    copy."""

    @staticmethod
    def forward(
        context: Any,
        rows_PI: torch.Tensor,
        sizes_E: Sequence[int],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        rows_PI = _row_major(rows_PI)
        ends_E = torch.tensor(sizes_E).cumsum(0, dtype=torch.int32).to(rows_PI.device)
        context.sizes_E = sizes_E
        context.save_for_backward(rows_PI, ends_E, *weights)
        if not len(rows_PI):  # the kernel has no form for it
            return rows_PI.new_empty(0, len(weights[0]))
        return grouped_mm(rows_PI, stacked(weights).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        context: Any, gradient_PO: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows_PI, ends_E, *weights = context.saved_tensors
        if not any(context.needs_input_grad[2:]):
            return (
                _gradient_of_rows(gradient_PO, weights, ends_E),
                None,
                *(None for _ in weights),
            )
        if not len(rows_PI):
            return (
                torch.zeros_like(rows_PI),
                None,
                *(torch.zeros_like(weight) for weight in weights),
            )
        gradient_PO = _row_major(gradient_PO)
        rows_gradient_PI = _gradient_of_rows(gradient_PO, weights, ends_E)
        weight_gradients = list(
            grouped_mm(gradient_PO.t(), rows_PI, offs=ends_E).unbind()
        )
        for group, size in enumerate(context.sizes_E):
            if (
                size == 0
            ):  # torch's kernel may leave it unwritten (pytorch/pytorch issue 172439)
                weight_gradients[group].zero_()
        return rows_gradient_PI, None, *weight_gradients


def _gradient_of_rows(
    gradient_PO: torch.Tensor, weights: Sequence[torch.Tensor], ends_E: torch.Tensor
) -> torch.Tensor:
    if not len(gradient_PO):  # the kernel has no form for it
        return gradient_PO.new_zeros(0, weights[0].shape[1])
    return grouped_mm(_row_major(gradient_PO), stacked(weights), offs=ends_E)


def _row_major(matrix: torch.Tensor) -> torch.Tensor:
    """Return a contiguous matrix. A matrix of one row is contiguous with any strides,
    but torch's kernel checks them."""
    return matrix.contiguous().flatten().view(matrix.shape)


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [E, O, I], without gradient. A view if the weights lie in one storage, in
    order and at equal distances, else a copy."""
    first = weights[0].detach()
    addresses = [weight.data_ptr() for weight in weights]
    distance = addresses[1] - addresses[0] if len(weights) > 1 else first.nbytes
    storage = first.untyped_storage()
    end = addresses[0] + (len(weights) - 1) * distance + first.nbytes
    is_in_one_storage = end <= storage.data_ptr() + storage.nbytes()
    is_regular = addresses == [
        addresses[0] + number * distance for number in range(len(weights))
    ]
    is_apart = distance >= first.nbytes and distance % _ALIGNMENT == 0
    if not (is_regular and is_apart and is_in_one_storage):
        return torch.stack([weight.detach() for weight in weights])
    strides = (distance // first.itemsize, *first.stride())
    return first.as_strided((len(weights), *first.shape), strides)
