"""FlexAttention under a tree mask next to one SDPA call per block, which is the
reference on a CPU.

Both are compared with SDPA in float64 on the same packed rows: the error of the one
kernel may be twice that of SDPA in the same dtype. A smoke run computes the forward
pass alone, in float32: torch has no backward pass of FlexAttention on a CPU, and there
keeps its scores in bfloat16, which the kernel does not.
"""

import time
from itertools import product

import torch
from torch._dynamo.utils import counters

from gpu_check.packed_rows import (
    Attention,
    AttentionInputs,
    calls_per_block,
    equal_rows,
    milliseconds,
    one_kernel,
    prefix_trees,
)
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.train.runtime import device

TIMED_TOKENS = 16_384
_CHECKED_TOKENS = 3000
_OTHER_LENGTHS = (1900, 4100)
"""Rows for which nothing may be compiled that `_CHECKED_TOKENS` did not need."""
_SMOKE_TOKENS = 700
_WINDOW = 150
_HEADS = 16
_KEY_HEADS = 8
_ROUNDING = 32 * torch.finfo(torch.float32).eps
"""An error that is no error: scores are sums of up to 128 products, in an order that
each kernel chooses."""


def run(settings: CheckSettings) -> None:
    device.prepare()
    dtypes = [torch.float32] if settings.smoke else [torch.bfloat16, torch.float32]
    too_large: list[str] = []
    compiled_anew: list[str] = []
    for dtype, dim in product(dtypes, (128, 64)):
        # A trainer has one dtype and one head_dim, and torch compiles eight times at
        # most.
        torch._dynamo.reset()
        too_large += _check_accuracy(settings, dtype, dim)
        compiled_anew += _check_compilations(settings, dtype, dim)
        if dtype == torch.bfloat16:
            _time(dim)
    assert not too_large, f"beyond twice SDPA's error: {'; '.join(too_large)}"
    assert not compiled_anew, (
        f"another length was compiled anew: {'; '.join(compiled_anew)}"
    )


def _check_accuracy(settings: CheckSettings, dtype: torch.dtype, dim: int) -> list[str]:
    """Names of results whose error is too large."""
    target = device.device()
    num_tokens = _SMOKE_TOKENS if settings.smoke else _CHECKED_TOKENS
    shares = {
        "equal_rows": equal_rows(num_tokens, 3),
        "prefix_trees": prefix_trees(num_tokens, 2),
    }
    too_large: list[str] = []
    for (shape, share), window in product(shares.items(), (None, _WINDOW)):
        inputs = _inputs(len(share.places_Q), dim, dtype)
        exact = inputs.to(torch.float64)
        started = time.monotonic()
        found = _results(settings, inputs, one_kernel(share, window, target))
        first_s = time.monotonic() - started
        plain = _results(
            settings, inputs, calls_per_block(share, window, target, dtype)
        )
        expected = _results(
            settings, exact, calls_per_block(share, window, target, torch.float64)
        )
        flex_errors = {
            name: _relative_error(found[name], expected[name]) for name in expected
        }
        sdpa_errors = {
            name: _relative_error(plain[name], expected[name]) for name in expected
        }
        emit(
            rows=shape,
            window=window,
            head_dim=dim,
            dtype=_name(dtype),
            tokens=len(share.places_Q),
            flex_errors=flex_errors,
            sdpa_errors=sdpa_errors,
            first_call_s=first_s,
        )
        for name, error in flex_errors.items():
            # A comparison with NaN is False, so a NaN does not pass.
            if not error <= max(2 * sdpa_errors[name], _ROUNDING):
                case = f"{name} of {shape}, window {window}, head_dim {dim}, {_name(dtype)}"
                too_large.append(f"{case}: {error:.2e}, SDPA's {sdpa_errors[name]:.2e}")
    return too_large


def _check_compilations(
    settings: CheckSettings, dtype: torch.dtype, dim: int
) -> list[str]:
    """Lengths that were compiled anew."""
    lengths = (500, 900) if settings.smoke else _OTHER_LENGTHS
    compiled: dict[int, int] = {}
    for length in lengths:
        before = counters["stats"]["unique_graphs"]
        share = prefix_trees(length, 2)
        inputs = _inputs(len(share.places_Q), dim, dtype)
        _results(settings, inputs, one_kernel(share, None, device.device()))
        compiled[length] = counters["stats"]["unique_graphs"] - before
    emit(head_dim=dim, dtype=_name(dtype), compiled_for_another_length=compiled)
    case = f"head_dim {dim}, {_name(dtype)}"
    return [
        f"{length} tokens, {case}: {number} graphs"
        for length, number in compiled.items()
        if number
    ]


def _time(dim: int) -> None:
    """A forward and a backward pass at 16k tokens."""
    target = device.device()
    shares = {
        "equal_rows": equal_rows(TIMED_TOKENS, 4),
        "prefix_trees": prefix_trees(TIMED_TOKENS, 2),
    }
    for shape, share in shares.items():
        inputs = _inputs(len(share.places_Q), dim, torch.bfloat16)
        started = time.monotonic()
        flex = one_kernel(share, None, target)
        torch.cuda.synchronize()
        mask_ms = 1e3 * (time.monotonic() - started)
        sdpa = calls_per_block(share, None, target, torch.bfloat16)
        emit(
            rows=shape,
            head_dim=dim,
            tokens=len(share.places_Q),
            mask_ms=mask_ms,
            flex=_step_figures(inputs, flex),
            sdpa=_step_figures(inputs, sdpa),
        )


def _step_figures(
    inputs: AttentionInputs, attention: Attention
) -> dict[str, float | str]:
    """Milliseconds of a forward and a backward pass, and the memory that they use."""
    torch.cuda.reset_peak_memory_stats()
    try:
        step_ms = milliseconds(
            lambda: inputs.forward_and_backward(attention), warm_up=2, rounds=5
        )
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error)}
    return {"ms": step_ms, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def _results(
    settings: CheckSettings, inputs: AttentionInputs, attention: Attention
) -> dict[str, torch.Tensor]:
    if settings.smoke:
        return {"output": inputs.forward(attention)}
    results = inputs.forward_and_backward(attention)
    torch.cuda.synchronize()
    return results


def _inputs(num_tokens: int, dim: int, dtype: torch.dtype) -> AttentionInputs:
    return AttentionInputs.random(
        num_tokens,
        heads=_HEADS,
        key_heads=_KEY_HEADS,
        dim=dim,
        dtype=dtype,
        target=device.device(),
    )


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of all numbers together."""
    return float((found.double() - expected).norm() / expected.norm())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
