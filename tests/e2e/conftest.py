"""The run that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.runs import train
from e2e.scrapes import Scrapes, free_port


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loop with spaces and ä")


@pytest.fixture(scope="session")
def scrapes() -> Scrapes:
    """What `learned` showed while it ran."""
    return Scrapes(free_port())


@pytest.fixture(scope="session")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TMPDIR of `learned`."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="session")
def learned(folder: Path, temporary: Path, scrapes: Scrapes) -> Path:
    """All its steps, all checkpoints and batches kept, and scraped; with a proxy that
    is dead, which nothing of ours may ask, in a locale that has ASCII only."""
    kept = ("--save-interval", "4", "--no-checkpoints.keep", "--save-rollout-data")
    shown = ("--metrics.port", str(scrapes.port), "--sglang-enable-metrics")
    with scrapes.running(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("TMPDIR", str(temporary))
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            environment.setenv(name, "http://127.0.0.1:9")
            environment.setenv(name.upper(), "http://127.0.0.1:9")
        for name, value in {
            "LC_ALL": "C",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONUTF8": "0",
        }.items():
            environment.setenv(name, value)
        return train(folder, "learned", *kept, *shown)
