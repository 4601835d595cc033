"""Which runs start engines that serve an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import make_family_model

from invrl.cli.commands.evaluate import run_evaluation
from invrl.cli.commands.serve import serve_model
from invrl.cli.flags import parse_flags
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.run.processes import cluster, serving
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.folder import make_run_folder


class Started(Exception):
    """The fleet would start its engines now."""

    def __init__(self, *_: object, adapter: ServedAdapter | None, **__: object) -> None:
        self.adapter = adapter
        raise self


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Settings of a run that trains an adapter and sends it alone."""
    monkeypatch.setattr(serving, "Fleet", Started)
    monkeypatch.setattr(serving, "start_guardian", lambda: None)
    flags = ("--weights.transport", "adapter", "--lora.rank", "4", "--run-name", "r")
    model = make_family_model(tmp_path / "model", "llama")
    paths = ("--model-path", str(model), "--run-root", str(tmp_path / "runs"))
    return resolve(*parse_flags((*flags, *paths)))


@pytest.mark.parametrize("run", [run_evaluation, serve_model])
async def test_evaluations_and_servers_start_engines_without_an_adapter(
    config: Config, run: Any
) -> None:
    with pytest.raises(Started) as started:
        await run(config, make_run_folder(config))
    assert started.value.adapter is None


async def test_a_training_run_starts_engines_that_serve_its_adapter(
    config: Config,
) -> None:
    folder = make_run_folder(config)
    with pytest.raises(Started) as started:
        async with cluster.start_cluster(config, folder, None):
            pass
    adapter = started.value.adapter
    assert adapter is not None
    assert adapter.rank == 4
