"""Linear layers over rows in groups, against one product for each group in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import invrl.train.layers.grouped_linear as grouped_linear_module
from invrl.train.layers.grouped_linear import grouped_linear, stacked

INPUTS = 64
OUTPUTS = 48
SIZES = {
    "unequal": (5, 17, 1, 9),
    "some empty": (0, 20, 0, 12),
    "the last ones empty": (32, 0, 0, 0),
    "one row": (0, 0, 1, 0),
    "no rows": (0, 0, 0, 0),
    "one group": (32,),
}
ACCUMULATION = INPUTS * 2.0**-23
"""Of a sum of products in float32, relative to the sum of their absolute values."""
ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator()
    generator.manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(dtype)


def separate(num_groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        drawn(OUTPUTS, INPUTS, dtype=dtype, seed=group) for group in range(num_groups)
    ]


def side_by_side(num_groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """In one tensor, with other values between them."""
    memory = drawn(
        num_groups,
        3,
        OUTPUTS,
        INPUTS,
        dtype=dtype,
        seed=100,
    )
    return list(memory[:, 1])


def with_strides(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> list[torch.Tensor]:
    memory = torch.randn(shape[0] * strides[0] + 10_000)
    return list(memory.as_strided(shape, strides))


def assert_is_product(
    result: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
) -> None:
    """As exact as its dtype allows."""
    left = left.double()
    right = right.double()
    expected = left @ right
    magnitude = left.abs() @ right.abs()
    rounding = ROUNDING[result.dtype] * expected.abs()
    bound = rounding + ACCUMULATION * magnitude
    error = (result.double() - expected).abs()
    assert (error <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("layout", [separate, side_by_side])
def test_grouped_products_and_gradients_equal_those_of_each_group(
    layout: Callable[[int, torch.dtype], list[torch.Tensor]],
    name: str,
    dtype: torch.dtype,
) -> None:
    sizes = SIZES[name]
    num_rows = sum(sizes)
    weights = layout(len(sizes), dtype)
    # Neither is contiguous.
    rows_PI = drawn(INPUTS, num_rows, dtype=dtype, seed=200).t()
    gradient_PO = drawn(OUTPUTS, num_rows, dtype=dtype, seed=201).t()
    for leaf in (rows_PI, *weights):
        leaf.requires_grad_()

    outputs_PO = grouped_linear(rows_PI, sizes, weights)
    outputs_PO.backward(gradient_PO)

    assert outputs_PO.shape == (num_rows, OUTPUTS)
    assert rows_PI.grad is not None
    for rows, row_gradient, outputs, gradient, weight in zip(
        rows_PI.detach().split(sizes),
        rows_PI.grad.split(sizes),
        outputs_PO.detach().split(sizes),
        gradient_PO.split(sizes),
        weights,
        strict=True,
    ):
        assert_is_product(outputs, rows, weight.detach().t())
        assert_is_product(row_gradient, gradient, weight.detach())
        assert weight.grad is not None
        assert_is_product(weight.grad, gradient.t(), rows)


def test_gradient_left_unwritten_by_the_kernel_is_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs of compute capability 10.0: of a group without rows."""
    sizes = SIZES["some empty"]
    weights = separate(len(sizes), torch.float32)
    for weight in weights:
        weight.requires_grad_()
    product = grouped_linear_module.grouped_mm

    def leaving_empty_groups_unwritten(
        *factors: torch.Tensor,
        offs: torch.Tensor,
    ) -> torch.Tensor:
        result = product(*factors, offs=offs)
        if result.dim() == 3:
            result[torch.tensor(sizes) == 0] = torch.nan
        return result

    monkeypatch.setattr(
        grouped_linear_module, "grouped_mm", leaving_empty_groups_unwritten
    )
    rows_PI = torch.ones(sum(sizes), INPUTS)
    outputs_PO = grouped_linear(rows_PI, sizes, weights)
    outputs_PO.sum().backward()
    for size, weight in zip(sizes, weights, strict=True):
        assert weight.grad is not None
        assert weight.grad.any() == (size > 0)


def test_weights_at_equal_distances_are_not_copied() -> None:
    weights = side_by_side(4, torch.bfloat16)
    stack = stacked(weights)
    assert stack.data_ptr() == weights[0].data_ptr()
    assert torch.equal(stack, torch.stack(weights))


FOUR = side_by_side(4, torch.bfloat16)
NOT_STACKED = {
    "in separate tensors": separate(4, torch.bfloat16),
    "in descending order": FOUR[::-1],
    "with a gap": [FOUR[0], FOUR[1], FOUR[3]],
    "twice the same": [FOUR[0], FOUR[0]],
    "overlapping": with_strides((3, 48, 64), (64, 64, 1)),
    "not aligned to 16 bytes": with_strides((3, 48, 64), (3073, 64, 1)),
}


@pytest.mark.parametrize("name", NOT_STACKED)
def test_weights_at_unequal_distances_are_copied(name: str) -> None:
    weights = NOT_STACKED[name]
    stack = stacked(weights)
    assert stack.data_ptr() != weights[0].data_ptr()
    assert torch.equal(stack, torch.stack(weights))
