"""The tokenizer that runs of all kinds keep in their folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.cli.commands.evaluate import run_evaluation
from invrl.cli.commands.serve import serve_model
from invrl.run.processes.tokenizer import keep_tokenizer
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.folder import make_run_folder


class Started(Exception):
    """The engines would start now."""


def started(*_: object, **__: object) -> None:
    raise Started


def configured(root: Path, model: Path) -> Config:
    tables = {
        "model": {"model_path": str(model)},
        "run": {"run_root": str(root), "run_name": "r"},
    }
    return resolve(Source(name="test", tables=tables))


@pytest.mark.parametrize("command", ["eval", "serve"])
async def test_evaluations_and_servers_keep_their_tokenizer(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "runs", make_tiny_model(tmp_path / "tiny"))
    folder = make_run_folder(config)
    run = run_evaluation if command == "eval" else serve_model
    monkeypatch.setattr("invrl.run.processes.serving.start_serving", started)
    with pytest.raises(Started):
        await run(config, folder)
    kept = (folder.tokenizer_path / "tokenizer.json").read_bytes()
    assert kept == (tmp_path / "tiny" / "tokenizer.json").read_bytes()


def test_failed_copy_of_the_tokenizer_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(tmp_path / "runs", make_tiny_model(tmp_path / "tiny"))
    folder = make_run_folder(config)
    folder.tokenizer_path.write_text("a file in its place")
    keep_tokenizer(config, folder)
    assert "the tokenizer cannot be copied" in caplog.text
