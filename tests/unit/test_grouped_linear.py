"""Linear layers over rows in groups, against one product for each group in float64."""

from __future__ import annotations

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


def separate(groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(OUTPUTS, INPUTS, generator=generator).to(dtype)
        for _ in range(groups)
    ]


def side_by_side(groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """In one tensor, with other values between them."""
    memory = torch.randn(
        groups, 3, OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    return [memory[group, 1] for group in range(groups)]


def check(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`found` is the product, as exact as its dtype allows."""
    expected = left.double() @ right.double()
    magnitude = left.double().abs() @ right.double().abs()
    bound = ROUNDING[found.dtype] * expected.abs() + ACCUMULATION * magnitude
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("layout", [separate, side_by_side])
def test_grouped_products_and_gradients_equal_those_of_each_group(
    layout, name: str, dtype: torch.dtype
) -> None:
    sizes = SIZES[name]
    weights = [weight.requires_grad_() for weight in layout(len(sizes), dtype)]
    generator = torch.Generator().manual_seed(2)
    # Neither is contiguous.
    rows_PI = (
        torch.randn(INPUTS, sum(sizes), generator=generator)
        .to(dtype)
        .t()
        .requires_grad_()
    )
    gradient_PO = torch.randn(OUTPUTS, sum(sizes), generator=generator).to(dtype).t()

    outputs_PO = grouped_linear(rows_PI, sizes, weights)
    outputs_PO.backward(gradient_PO)

    assert outputs_PO.shape == (sum(sizes), OUTPUTS)
    assert rows_PI.grad is not None
    rows_by_group = rows_PI.detach().split(sizes)
    for group, gradient in enumerate(gradient_PO.split(sizes)):
        weight = weights[group].detach()
        rows = rows_by_group[group]
        check(outputs_PO.detach().split(sizes)[group], rows, weight.t())
        check(rows_PI.grad.split(sizes)[group], gradient, weight)
        weight_gradient = weights[group].grad
        assert weight_gradient is not None
        check(weight_gradient, gradient.t(), rows)


def test_gradient_left_unwritten_by_the_kernel_is_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on GPUs of compute capability 10.0: of a group without rows."""
    sizes = SIZES["some empty"]
    weights = [
        weight.requires_grad_() for weight in separate(len(sizes), torch.float32)
    ]
    product = grouped_linear_module.grouped_mm

    def leaving_empty_groups_unwritten(
        *args: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:
        result = product(*args, offs=offs)
        if result.dim() == 3:
            result[torch.tensor(sizes) == 0] = torch.nan
        return result

    monkeypatch.setattr(
        grouped_linear_module, "grouped_mm", leaving_empty_groups_unwritten
    )
    grouped_linear(torch.ones(sum(sizes), INPUTS), sizes, weights).sum().backward()
    for size, weight in zip(sizes, weights, strict=True):
        assert weight.grad is not None
        assert weight.grad.any() == (size > 0)


def test_weights_at_equal_distances_are_not_copied() -> None:
    weights = side_by_side(4, torch.bfloat16)
    stack = stacked(weights)
    assert stack.data_ptr() == weights[0].data_ptr()
    assert torch.equal(stack, torch.stack(weights))


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(separate(4, torch.bfloat16), id="in separate tensors"),
        pytest.param(side_by_side(4, torch.bfloat16)[::-1], id="in descending order"),
        pytest.param(
            [side_by_side(4, torch.bfloat16)[group] for group in (0, 1, 3)],
            id="with a gap",
        ),
        pytest.param([side_by_side(2, torch.bfloat16)[0]] * 2, id="twice the same"),
        pytest.param(
            list(torch.randn(50, 64).as_strided((3, 48, 64), (64, 64, 1))),
            id="overlapping",
        ),
        pytest.param(
            list(torch.randn(3 * 3073).as_strided((3, 48, 64), (3073, 64, 1))),
            id="not aligned to 16 bytes",
        ),
    ],
)
def test_weights_at_unequal_distances_are_copied(weights: list[torch.Tensor]) -> None:
    stack = stacked(weights)
    assert stack.data_ptr() != weights[0].data_ptr()
    assert torch.equal(stack, torch.stack(weights))
