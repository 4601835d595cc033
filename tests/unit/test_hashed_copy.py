"""A copy that is hashed: the target's bytes, and their checksum."""

from __future__ import annotations

import pytest
import torch

from invrl.weights.tensors.tensor_spec import checksum, copy_hashed


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(1000).to(torch.bfloat16).view(10, 100),
        torch.arange(1000.0).view(20, 50).t(),
        torch.zeros(0, 4),
        torch.tensor(3.5),
    ],
    ids=["bfloat16", "transposed", "empty", "scalar"],
)
def test_hashed_copy_returns_the_checksum_of_the_copied_bytes(
    source: torch.Tensor,
) -> None:
    target = torch.full_like(source, 7, memory_format=torch.contiguous_format)
    assert copy_hashed(target, source) == checksum(source)
    assert torch.equal(target, source)


def test_hashed_copy_into_a_strided_target_of_another_dtype() -> None:
    """The checksum is that of the target's bytes."""
    whole = torch.zeros(6, 8, dtype=torch.bfloat16)
    source = torch.randn(6, 4)
    assert copy_hashed(whole[:, 2:6], source) == checksum(source.bfloat16())
    assert torch.equal(whole[:, 2:6], source.bfloat16())


def test_hashed_copy_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        copy_hashed(torch.zeros(3), torch.zeros(1))
