"""An error on the terminal is two lines, whatever Ray and other processes have said."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from invrl.cli.error_summary import summarize_error
from invrl.errors import (
    DamagedFileError,
    IdenticalFailuresError,
    InvrlError,
    ServerError,
    TrainError,
)

LOG = Path("/runs/a/logs/driver.log")
OF_RAY = "\n".join(
    [
        "Traceback (most recent call last):",
        *(f'  File "x{n}.py", line {n}' for n in range(100)),
    ]
)


def lines(error: BaseException) -> list[str]:
    text_lines = summarize_error(error).lines(LOG)
    assert len(text_lines) == 2
    assert not any("\n" in line or "\x1b" in line for line in text_lines)
    return text_lines


def test_actor_error_is_printed_without_rays_traceback() -> None:
    cause = IdenticalFailuresError(
        "all 32 rollouts so far failed", fix="correct what it names"
    )
    wrapped = RayTaskError(
        "\x1b[36mray::BufferActor.take()\x1b[39m", OF_RAY, cause
    ).as_instanceof_cause()
    assert isinstance(wrapped, InvrlError)
    assert len(str(wrapped).splitlines()) > 100
    assert lines(wrapped) == [
        "all 32 rollouts so far failed",
        f"  fix: correct what it names; log: {LOG}",
    ]


def test_last_line_shows_the_fix_of_the_error() -> None:
    error = IdenticalFailuresError(
        "all failed: returned 'x'. Fix: return a float. at a.py:1", fix="mend it"
    )
    assert lines(error) == [
        "all failed: returned 'x'. Fix: return a float. at a.py:1",
        f"  fix: mend it; log: {LOG}",
    ]


def test_library_error_in_an_actor_is_printed_in_one_line() -> None:
    wrapped = RayTaskError(
        "take()", OF_RAY, KeyError("no such field")
    ).as_instanceof_cause()
    assert lines(wrapped) == ["KeyError: 'no such field'", f"  log: {LOG}"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ServerError("the port is taken"), "the port is taken"),
        (
            ServerError(
                "engine-0 ended with code 1. Last lines of e.log:\na\nRuntimeError: no memory\nb"
            ),
            "engine-0 ended with code 1. Last lines of e.log: RuntimeError: no memory",
        ),
        (
            ServerError(
                "engine-0 ended with code -9. Last lines of e.log:\nloading\nloaded"
            ),
            "engine-0 ended with code -9. Last lines of e.log: loaded",
        ),
        (
            TrainError("trainer rank 0 failed: RuntimeError: a\n  b"),
            "trainer rank 0 failed: RuntimeError: a b",
        ),
    ],
)
def test_invrl_error_is_printed_in_one_line(error: InvrlError, told: str) -> None:
    assert lines(error) == [told, f"  log: {LOG}"]


def test_fix_is_printed_next_to_the_log_path() -> None:
    error = DamagedFileError(
        Path("/runs/a/run.sqlite"), "it is gone", "begin a new run"
    )
    assert lines(error) == [
        "/runs/a/run.sqlite: it is gone",
        f"  fix: begin a new run; log: {LOG}",
    ]


def test_internal_error_names_its_file_and_line() -> None:
    try:
        {}["x"]
    except KeyError as error:
        (text, _) = lines(error)
    assert text.startswith("KeyError: 'x' (")
    assert "test_error_summary.py:" in text
