"""An adapter that a run begins with (`--lora.path`) is needed until the first
checkpoint has it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from adapter_folders import make_adapter
from family_models import make_family_model

from invrl.cli.checks.model_checks import check_trainable
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.checkpoints.checkpoint import Checkpoint
from invrl.run.checkpoints.resume import Start
from invrl.run.incarnations import incarnation
from invrl.run.settings.config import Config, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.store.run_folder import RunFolder


class Started(Exception):
    """The processes of a run would start now."""

    def __init__(self, config: Config, *_: object) -> None:
        self.config = config
        raise self


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = make_family_model(tmp_path / "model", "llama")
    return make_adapter(tmp_path / "adapter", model)


@pytest.fixture
def config(tmp_path: Path, adapter: Path) -> Config:
    lora = ("--lora.rank", "4", "--lora.alpha", "8", "--lora.path", str(adapter))
    place = ("--run-root", str(tmp_path / "runs"), "--run-name", "r")
    model = ("--model-path", str(tmp_path / "model"))
    return resolve(*parse_flags((*lora, *place, *model)))


@pytest.fixture
def folder(config: Config, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(incarnation, "start_cluster", Started)
    monkeypatch.setattr(incarnation, "check_store_at", lambda *_: None)
    return make_run_folder(config)


def checkpoint_in(folder: RunFolder) -> Checkpoint:
    path = folder.checkpoints_path / "step-000004"
    (path / "megatron").mkdir(parents=True)
    (path / "buffer.json").touch()
    return Checkpoint(step=4, path=path)


def test_a_run_without_a_checkpoint_needs_the_adapter(
    config: Config, folder: RunFolder, adapter: Path
) -> None:
    check_trainable(config)
    with pytest.raises(Started) as started:
        incarnation.run_incarnation(config, folder)
    lora = started.value.config.train.lora
    assert lora is not None
    assert lora.path == str(adapter)
    shutil.rmtree(adapter)
    with pytest.raises(ConfigError, match=r"lora\.path"):
        check_trainable(config)


def test_a_checkpoint_is_resumed_after_the_adapter_is_gone(
    config: Config, folder: RunFolder, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(checkpoint=checkpoint_in(folder))
    monkeypatch.setattr(incarnation, "find_start", lambda *_: start)
    shutil.rmtree(adapter)
    check_trainable(config)
    with pytest.raises(Started) as started:
        incarnation.run_incarnation(config, folder)
    lora = started.value.config.train.lora
    assert lora is not None
    assert lora.path is None
    assert lora.rank == 4
