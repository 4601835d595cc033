"""A safetensors file that is written tensor by tensor is read as one that was written
at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from invrl.errors import TrainError
from invrl.train.weights.safetensors_file import write_safetensors
from invrl.weights.tensors.tensor_spec import make_spec


@pytest.fixture
def ordinary_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(5, 6, generator=draw)
    return {
        "embed é": table.to(torch.bfloat16),
        "a view": table.t()[1:4],
        "half": table.to(torch.float16)[:, ::2],
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
    }


def write(path: Path, given: dict[str, torch.Tensor]) -> None:
    write_safetensors(
        path,
        tuple(make_spec(name, tensor) for name, tensor in given.items()),
        given.items(),
    )


@pytest.mark.usefixtures("ordinary_umask")
def test_safetensors_file_is_read_back_bit_for_bit_and_has_its_permissions(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    write(path, tensors())
    loaded = load_file(path)
    assert loaded.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_safetensors_header_equals_the_reference_implementations(
    tmp_path: Path,
) -> None:
    """Its writer orders tensors by dtype and name; here they come in that order."""
    named_tensors = {
        "a": torch.ones(3),
        "b": torch.zeros(2, 2),
    }
    write(tmp_path / "ours", named_tensors)
    save_file(named_tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_outside_of_the_layout_are_refused(tmp_path: Path) -> None:
    layout = tuple(make_spec(name, tensor) for name, tensor in tensors().items())
    swapped = reversed(tensors().items())
    with pytest.raises(TrainError, match="the layout has"):
        write_safetensors(tmp_path / "swapped", layout, swapped)
    with pytest.raises(ValueError, match="shorter"):
        write_safetensors(tmp_path / "short", layout, list(tensors().items())[:-1])
