"""What our processes log: one line format, as text or JSON, and no key in any of it."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from invrl.host.output import masked_keys
from invrl.host.output.log_lines import (
    LineFormatter,
    LogSettings,
    session_of_task,
    write_log_lines,
)
from invrl.host.output.masked_keys import without_keys
from invrl.interfaces import Endpoint
from invrl.rollout.config import RolloutConfig, WorkersConfig
from invrl.rollout.workers.runner import Runner
from invrl.rollout.workers.worker_actor import Assignment, RolloutWorker, WorkerSettings
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task

SECRET = "0123456789abcdef0123456789abcdef"
SESSION_KEY = "isk-0" + "aB3_-" * 8 + "x9="


@pytest.mark.parametrize(
    "text",
    [
        f"server_args={ {'port': 1, 'api_key': SECRET, 'admin_api_key': SECRET, 'log_level': 'info'} }",
        f"ServerArgs(port=1, api_key='{SECRET}', admin_api_key='{SECRET}', log_level='info')",
        f'{{"api_key": "{SECRET}", "admin_api_key": "{SECRET}", "log_level": "info"}}',
        f"python -m launch --api-key={SECRET} --admin-api-key={SECRET} log_level",
        f"python -m launch --api-key {SECRET} --admin-api-key '{SECRET}' log_level",
        f"OPENAI_API_KEY={SECRET} INVRL_ENV_KEY={SECRET} log_level",
        f"Authorization: Bearer {SECRET}, X-Api-Key: {SECRET}, log_level",
        f"[(b'authorization', b'Bearer {SECRET}'), (b'x-api-key', b'{SECRET}'), (b'log_level', b'')]",
        f"{{'Authorization': 'Basic {SECRET}', 'other': 'bearer {SECRET}'}} log_level",
        f"GET http://a:{SECRET}@host/v1?log_level=1&key={SECRET}",
        f"GET http://host/v1?api_key={SECRET} http://host/v1?a=b&token={SECRET}#log_level",
    ],
)
def test_keys_are_masked_in_every_spelling(text: str) -> None:
    masked = without_keys(text)
    assert SECRET not in masked
    assert masked.count("(not shown)") == 2
    assert "log_level" in masked
    assert without_keys(masked) == masked


def test_session_keys_are_masked_in_urls_and_headers() -> None:
    text = f"POST http://127.0.0.1:8000/s/{SESSION_KEY}/v1 Authorization: Bearer {SESSION_KEY}"
    masked = without_keys(text)
    assert SESSION_KEY not in masked
    assert "/s/(session key)/v1" in masked


def test_text_without_a_key_is_not_masked() -> None:
    for text in (
        "api_key=None",
        "{'api_key': None, 'a': 1}",
        '{"api_key": null}',
        "keys: 3",
        "a prompt about an api key",
        "tokens=7, access tokens: 2",
        "http://127.0.0.1:8000/v1/chat/completions?limit=3",
        'key: $INVRL_ENV_KEY, or "env_key" in runs/a/private/gateway.json',
        "the bearer of news",
    ):
        assert without_keys(text) == text


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("invrl.test_log_lines")
    logger.propagate = False
    logger.setLevel("DEBUG")
    yield logger
    logger.handlers.clear()


def logged(logger: logging.Logger, settings: LogSettings) -> str:
    """What is written of three records, the second in a session and the third with a
    traceback."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("gateway-worker-0", settings))
    logger.addHandler(handler)
    logger.info("%d requests with %s", 3, {"api_key": SECRET})
    token = session_of_task.set("ses-01")
    logger.warning('the client "went" away\nfor good')
    session_of_task.reset(token)
    try:
        raise ValueError(f"Authorization: Bearer {SECRET} at /s/{SESSION_KEY}/v1")
    except ValueError:
        logger.exception("failed")
    assert SECRET not in stream.getvalue()
    assert SESSION_KEY not in stream.getvalue()
    return stream.getvalue()


def test_text_log_line_has_time_level_process_run_and_session(
    logger: logging.Logger,
) -> None:
    lines = logged(logger, LogSettings(run="r7")).splitlines()
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    name = r"invrl\.test_log_lines"
    assert re.fullmatch(
        rf"{when} I gateway-worker-0 run=r7 {name}: 3 requests with .*", lines[0]
    )
    assert re.fullmatch(
        rf"{when} W gateway-worker-0 run=r7 session=ses-01 {name}: the client .*",
        lines[1],
    )
    assert re.fullmatch(rf"{when} E gateway-worker-0 run=r7 {name}: failed", lines[3])
    assert lines[4] == "Traceback (most recent call last):"
    assert (
        lines[-1]
        == "ValueError: Authorization: Bearer (not shown) at /s/(session key)/v1"
    )


def test_json_log_line_is_one_object_with_the_same_fields(
    logger: logging.Logger,
) -> None:
    first, second, third = map(
        json.loads, logged(logger, LogSettings(run="r7", format="json")).splitlines()
    )
    assert first | {"time": ""} == {
        "time": "",
        "level": "info",
        "process": "gateway-worker-0",
        "run": "r7",
        "logger": "invrl.test_log_lines",
        "message": "3 requests with {'api_key': '(not shown)'}",
    }
    assert second["session"] == "ses-01"
    assert second["message"] == 'the client "went" away\nfor good'
    assert third["traceback"].startswith("Traceback (most recent call last):")


def test_log_handlers_of_other_libraries_write_no_key(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger
) -> None:
    monkeypatch.setattr(logging.Handler, "format", logging.Handler.format)
    masked_keys.mask_keys_in_logs()
    masked_keys.mask_keys_in_logs()  # as in a process that imports the module twice
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.info("server_args=%s", {"api_key": SECRET, "a": 1})
    logger.info("%d requests", 3)
    try:
        raise ValueError(f"api_key={SECRET}")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["server_args={'api_key': '(not shown)', 'a': 1}", "3 requests"]
    assert lines[-1] == "ValueError: api_key=(not shown)"
    assert SECRET not in stream.getvalue()


def test_log_level_follows_the_settings_and_a_later_setup_replaces_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = root.level
    try:
        write_log_lines("supervisor", LogSettings(), file=tmp_path / "first.log")
        write_log_lines(
            "driver", LogSettings(level="warning"), file=tmp_path / "second.log"
        )
        logging.getLogger("invrl.anything").info("hidden")
        logging.getLogger("invrl.anything").warning("shown")
        logging.getLogger("httpx").info("hidden")
    finally:
        for handler in root.handlers:
            handler.close()
        root.setLevel(before)
    assert (tmp_path / "first.log").read_text() == ""
    [line] = (tmp_path / "second.log").read_text().splitlines()
    assert " W driver invrl.anything: shown" in line


def test_output_files_of_an_actor_begin_with_its_process_name_and_hold_no_key() -> None:
    """Ray names the files by numbers."""
    program = f"""
        import logging
        from invrl.host.ray.actor_output import begin_output
        from invrl.host.output.log_lines import LogSettings
        begin_output("trainer-rank-3", LogSettings(run="r7", level="warning"))
        print("key:", "{SESSION_KEY}")
        logging.info("not this")
        logging.warning("api_key={SECRET}")
        1 / 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ":process:trainer-rank-3 of run r7\nkey: (session key)\n"
    mark, line, *traceback = done.stderr.splitlines()
    assert mark == ":process:trainer-rank-3 of run r7"
    assert line.endswith("Z W trainer-rank-3 run=r7 root: api_key=(not shown)")
    assert traceback[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "ids",
    [
        ["ses-1"],
        ["ses-1", "ses-2"],
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
async def test_log_lines_of_user_code_name_its_sessions(
    ids: list[str], in_thread: bool
) -> None:
    seen: list[str] = []

    def in_a_thread(task: Task, endpoints: list[Endpoint]) -> list[float]:
        seen.append(session_of_task.get())
        return [1.0] * len(endpoints)

    async def in_the_loop(task: Task, endpoints: list[Endpoint]) -> list[float]:
        return in_a_thread(task, endpoints)

    rollout = RolloutConfig(workers=WorkersConfig(memory_gb=None))
    worker = RolloutWorker(
        WorkerSettings(gateway_url="http://127.0.0.1:9", model="m", rollout=rollout)
    )
    function: Any = in_a_thread if in_thread else in_the_loop
    function.group = True
    worker._runner = Runner(function, None, timeout_s=60.0)
    worker._pool = None  # type: ignore[assignment]
    worker._client = NoGateway()  # type: ignore[assignment]
    sessions = tuple(
        Session(
            id=session_id,
            key=SESSION_KEY,
            base_url="http://127.0.0.1:9",
            task_id="t",
            group_id="g",
            purpose="train",
            sampling=Sampling(),
            index=0,
            attempt=0,
        )
        for session_id in ids
    )
    await worker.run(Assignment(task=Task(id="t", payload={}), sessions=sessions))
    assert seen == [",".join(ids)]
    assert session_of_task.get() == ""


class NoGateway:
    """Takes every report."""

    async def attach(self, *_: object) -> None: ...

    async def finish(self, *_: object) -> None: ...

    async def abort(self, *_: object) -> None: ...
