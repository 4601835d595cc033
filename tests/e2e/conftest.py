"""The run that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.runs import train


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop with spaces")


@pytest.fixture(scope="session")
def learned(folder: Path) -> Path:
    """All its steps, all checkpoints and batches kept."""
    kept = ("--save-interval", "4", "--keep-checkpoints", "0", "--save-rollout-data")
    return train(folder, "learned", *kept)
