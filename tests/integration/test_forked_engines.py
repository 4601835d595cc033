"""Engines that a process has forked which has imported SGLang. What such a process does
for any server is in `tests/unit/test_fork_parent.py`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from invrl.engines.config import EngineConfig
from invrl.engines.launch.engine_server import ENGINE_MODULE, EngineServer
from invrl.errors import ServerError
from invrl.host.processes.fork_parent import ForkParent

CONFIG = EngineConfig(dtype="float32", start_timeout_s=500.0)


def test_forked_engines_have_their_own_keys_and_one_dies_alone(
    engine_parent: ForkParent, tiny_model: Path, tmp_path: Path
) -> None:
    killed, other = (
        EngineServer(
            name,
            CONFIG,
            model_path=tiny_model,
            run_folder=tmp_path,
            parent=engine_parent,
        )
        for name in ("engine-a", "engine-b")
    )
    try:
        killed.wait_ready()
        other.wait_ready()
        for server in (killed, other):
            http_server, *others = server.processes()
            assert len(others) == 2
            command = " ".join(http_server.cmdline())
            assert f"{ENGINE_MODULE} --model-path {tiny_model}" in command
            assert server.api_key not in command
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"engine-a ended with code -9"):
            killed.wait_until(lambda: False, deadline_s=60.0)
        other.check_alive()
    finally:
        killed.stop()
        other.stop()


def test_engine_whose_parent_cannot_import_sglang_says_why(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(
        "raise ImportError('half installed')", encoding="utf-8"
    )
    paths = [str(broken.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    parent = ForkParent(ENGINE_MODULE, log=tmp_path / "engine-parent.log")
    server = EngineServer(
        "engine-c", CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=parent
    )
    try:
        with pytest.raises(
            ServerError, match=r"(?s)engine-c did not start.*half installed"
        ):
            server.wait_ready()
    finally:
        server.stop()
        parent.stop()
