"""What is said of the implementations that compute a trainer's operations, for machines
that have others."""

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from invrl.train.runtime.kernels import Kernels, fused_adam


@pytest.mark.parametrize(
    ("on_cuda", "head_dim", "packages", "attention", "optimizer"),
    [
        (False, 64, set[str](), "SDPA", "torch AdamW"),
        (True, 64, set[str](), "FlexAttention", "torch AdamW"),
        (True, 8, {"apex"}, "SDPA", "Apex's FusedAdam"),
        (
            True,
            64,
            {"apex", "transformer_engine"},
            "FlexAttention",
            "TransformerEngine's FusedAdam",
        ),
    ],
)
def test_best_installed_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch,
    on_cuda: bool,
    head_dim: int,
    packages: set[str],
    attention: str,
    optimizer: str,
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in packages else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    kernels = Kernels.of(
        head_dim=head_dim, has_experts=False, dtype="bfloat16", on_cuda=on_cuda
    )
    assert attention in kernels.attention
    assert kernels.optimizer == optimizer
    assert (fused_adam() or "torch AdamW") == optimizer
    assert "flash-attn" not in str(kernels)
    assert "experts" not in str(kernels)
    packages.add("flash_attn")
    assert "flash-attn is installed and not used" in str(kernels)


@pytest.mark.parametrize(
    ("on_cuda", "dtype", "implementation"),
    [
        (True, "bfloat16", "one kernel for all experts"),
        (True, "float32", "a product for each expert"),
        (False, "bfloat16", "a product for each expert"),
    ],
)
def test_kernel_of_the_experts_is_named(
    on_cuda: bool, dtype: str, implementation: str
) -> None:
    kernels = Kernels.of(head_dim=64, has_experts=True, dtype=dtype, on_cuda=on_cuda)
    assert f"experts: torch grouped_mm, {implementation}" in str(kernels)


def test_megatron_uses_the_named_optimizer() -> None:
    from invrl.train.runtime import device

    device.prepare()
    import megatron.core.optimizer as megatron
    import torch

    is_torch = megatron.Adam is torch.optim.AdamW
    kernels = Kernels.of(
        head_dim=64, has_experts=False, dtype="bfloat16", on_cuda=False
    )
    assert (kernels.optimizer == "torch AdamW") == is_torch
