"""The lines of an engine's log, from a process that logs as SGLang's do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from invrl.engines.inside_sglang.engine_instance import NAME_VARIABLE
from invrl.engines.inside_sglang.engine_log import log_environment
from invrl.host.output.log_lines import LogSettings

SCHEDULER = """
import json, logging.config, os, setproctitle
setproctitle.setproctitle("sglang::scheduler_TP1")
logging.config.dictConfig(json.load(open(os.environ["SGLANG_LOGGING_CONFIG_PATH"])))
logging.getLogger("sglang.srt").info("not wanted")
logging.getLogger("sglang.srt").warning("api_key='secret-of-engine'")
"""
HTTP_PROCESS = """
import logging.config, warnings
from invrl.engines.inside_sglang.engine_log import log_in_lines
log_in_lines()
warnings.warn("old")
from uvicorn.config import LOGGING_CONFIG
LOGGING_CONFIG["formatters"]["default"]["fmt"] = "[%(asctime)s] %(message)s"  # as SGLang does
logging.config.dictConfig(LOGGING_CONFIG)
logging.getLogger("uvicorn.error").error("of uvicorn")
"""


def logged(program: str, environment: dict[str, str]) -> list[str]:
    given = {
        name: value
        for name, value in os.environ.items()
        if name != "SGLANG_LOGGING_CONFIG_PATH"
    }
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ended.stderr.splitlines()


def test_engine_log_line_names_its_engine_and_process(tmp_path: Path) -> None:
    settings = LogSettings(run="a-run", format="json")
    environment = log_environment(settings, level="warning", folder=tmp_path)
    environment[NAME_VARIABLE] = "engine-3"
    [line] = [json.loads(line) for line in logged(SCHEDULER, environment)]
    assert line["process"] == "engine-3/scheduler_TP1"
    assert line["run"] == "a-run"
    assert line["level"] == "warning"
    assert "secret" not in line["message"]


def test_http_process_of_an_engine_logs_in_the_same_format(tmp_path: Path) -> None:
    environment = log_environment(LogSettings(run="r"), level="info", folder=tmp_path)
    environment[NAME_VARIABLE] = "engine-0"
    lines = logged(HTTP_PROCESS, environment)
    [warning] = [line for line in lines if "UserWarning: old" in line]
    [error] = [line for line in lines if "of uvicorn" in line]
    assert " W engine-0 run=r py.warnings: " in warning
    assert error.endswith(" E engine-0 run=r uvicorn.error: of uvicorn")


def test_logging_configuration_of_the_user_takes_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_LOGGING_CONFIG_PATH", "/mine.json")
    assert log_environment(LogSettings(), level="info", folder=tmp_path) == {}
    assert not list(tmp_path.iterdir())
