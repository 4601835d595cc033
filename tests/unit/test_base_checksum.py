"""The checksum of an adapter's base, and when it is computed again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from family_models import make_family_model

from invrl.train.adapters import base_checksum
from invrl.train.adapters.base_checksum import kept_checksum, weights_checksum

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family_model(tmp_path / "model", "llama")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders whose weights were read."""
    read: list[Path] = []

    def read_and_note(folder: Path) -> str:
        read.append(folder)
        return weights_checksum(folder)

    monkeypatch.setattr(base_checksum, "weights_checksum", read_and_note)
    return read


def test_the_checksum_of_a_base_changes_with_any_weight(
    tmp_path: Path, model: Path
) -> None:
    same = make_family_model(tmp_path / "same", "llama")
    other = make_family_model(tmp_path / "other", "llama", seed=1)
    assert weights_checksum(same) == weights_checksum(model)
    assert weights_checksum(other) != weights_checksum(model)


def test_a_kept_checksum_is_not_computed_again(
    tmp_path: Path, model: Path, reads: list[Path]
) -> None:
    kept = tmp_path / "kept.json"
    expected = weights_checksum(model)
    assert [kept_checksum(model, kept) for _ in range(3)] == 3 * [expected]
    assert reads == [model]


def replace_weights(model: Path, _: Path) -> None:
    """Other weights of the same size."""
    status = (model / WEIGHTS).stat()
    other = make_family_model(model.parent / "other", "llama", seed=1)
    (model / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    assert (model / WEIGHTS).stat().st_size == status.st_size
    os.utime(model / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def move_base(model: Path, _: Path) -> None:
    """Another base at the place of the first, both with the same times of change."""
    model.rename(model.parent / "moved")
    other = make_family_model(model, "llama", seed=1)
    os.utime(other / WEIGHTS)


def damage_file(_: Path, kept: Path) -> None:
    kept.write_text("{")


@pytest.mark.parametrize("change", [replace_weights, move_base, damage_file])
def test_the_checksum_of_a_changed_base_is_computed_again(
    tmp_path: Path, model: Path, reads: list[Path], change: Any
) -> None:
    kept = tmp_path / "kept.json"
    kept_checksum(model, kept)
    change(model, kept)
    assert kept_checksum(model, kept) == weights_checksum(model)
    assert len(reads) == 2


def test_a_checksum_that_cannot_be_kept_is_returned(
    tmp_path: Path, model: Path
) -> None:
    nowhere = tmp_path / "gone" / "kept.json"
    assert kept_checksum(model, nowhere) == weights_checksum(model)
