"""`--model-path RUN`: the newest model of another run, settled when a run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.cli.checks.model_checks import check_model
from invrl.errors import ConfigError
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.initial_model import with_initial_models
from invrl.store.run_folder import KEEP_NAME


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    run = tmp_path / "first stage"
    model = make_tiny_model(tmp_path / "model")
    for step in (2, 4):
        checkpoint = run / f"checkpoints/step-{step:06d}"
        shutil.copytree(model, checkpoint / "hugging_face")
        (checkpoint / "megatron").mkdir()
    (run / "config.resolved.toml").touch()
    return run


def configuration(model: Path, reference: str | None = None) -> Config:
    tables = {
        "model": {"model_path": str(model), "reference_model_path": reference},
        "kl": {"coefficient": 0.1},
        "critic": {"model_path": reference},
    }
    return resolve(Source(name="test", tables=tables))


def test_model_path_of_a_run_folder_means_its_newest_model(run: Path) -> None:
    config = configuration(run)
    assert config.model.folder == run / "checkpoints/step-000004/hugging_face"
    assert config.model.name == "first stage"
    assert check_model(config) == config.model.folder


def test_weights_saved_without_a_checkpoint_count_as_newest_model(run: Path) -> None:
    shutil.copytree(
        run / "checkpoints/step-000004/hugging_face", run / "checkpoints/model-000005"
    )
    config = configuration(run)
    assert config.model.folder == run / "checkpoints/model-000005"
    assert config.model.name == "first stage"
    assert with_initial_models(config).model.model_path == str(
        run / "checkpoints/model-000005"
    )


def test_model_path_of_a_run_is_resolved_once_and_its_model_kept(
    run: Path, tmp_path: Path
) -> None:
    config = with_initial_models(configuration(run, reference=str(run)))
    checkpoint = run / "checkpoints/step-000004"
    assert config.model.model_path == str(checkpoint)
    assert config.model.reference_model_path == str(checkpoint)
    assert config.algorithm.critic is not None
    assert config.algorithm.critic.model_path == str(checkpoint)
    assert (checkpoint / KEEP_NAME).exists()
    shutil.copytree(checkpoint, run / "checkpoints/step-000006")
    assert config.model.folder == checkpoint / "hugging_face", "the other run goes on"
    plain = configuration(tmp_path / "model")
    assert with_initial_models(plain) == plain
    assert not (tmp_path / "model" / KEEP_NAME).exists()


def test_model_path_of_a_run_without_a_model_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    config = with_initial_models(configuration(run))
    assert config.model.model_path == str(run)
    with pytest.raises(ConfigError, match="a run that has saved no model yet"):
        check_model(config)
