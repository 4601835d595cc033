"""A stage, and how it is run: a process with a deadline, so that a hang or a crash
costs no other stage."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gpu_check.failure import describe_failure
from gpu_check.result import emitted, skip_reason
from gpu_check.settings import CheckSettings

_END_S = 10.0
"""For a stage to end what it has started, after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    """That of its module in `stages/`, too."""
    proves: str
    usual_s: float
    """With less time left than this, the stage is not started."""
    deadline_s: float
    smaller: str
    """What to change where it runs out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is written of a stage."""

    state: Literal["passed", "failed", "skipped", "not run"]
    seconds: float
    results: list[dict[str, object]]
    reason: str = ""
    """Why it is not passed."""
    last_lines: tuple[str, ...] = ()
    """Of its log, where it failed."""

    def as_json(self) -> dict[str, object]:
        return {
            name: value
            for name, value in asdict(self).items()
            if value or name in ("state", "seconds")
        }


def not_run(reason: str) -> Outcome:
    return Outcome(state="not run", seconds=0.0, results=[], reason=reason)


def run_stage(
    stage: Stage,
    settings: CheckSettings,
    deadline_s: float,
    environment: Mapping[str, str],
) -> Outcome:
    """Its log is `<name>.log` in the folder for results."""
    start = time.monotonic()
    path = settings.out / f"{stage.name}.log"
    with path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpu_check.stages",
                stage.name,
                _as_argument(settings),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            exit_status: int | None = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            exit_status = None
        finally:
            _end(process)
    text = path.read_text(errors="replace", encoding="utf-8")
    seconds = round(time.monotonic() - start, 1)
    reason = skip_reason(text)
    if exit_status == 0 and reason is not None:
        return Outcome(
            state="skipped", seconds=seconds, results=emitted(text), reason=reason
        )
    if exit_status == 0:
        return Outcome(state="passed", seconds=seconds, results=emitted(text))
    failure = describe_failure(text, stage.smaller)
    reason = failure.reason
    if exit_status is None:
        reason = f"it did not end within {deadline_s:.0f} s; {reason}"
    elif exit_status < 0:
        reason = f"ended by {signal.Signals(-exit_status).name}; {reason}"
    return Outcome(
        state="failed",
        seconds=seconds,
        results=emitted(text),
        reason=reason,
        last_lines=failure.last_lines,
    )


def _as_argument(settings: CheckSettings) -> str:
    return json.dumps(asdict(settings), default=str)


def parse_settings_argument(argument: str) -> CheckSettings:
    values = json.loads(argument)
    for name in ("out", "work", "trained_model"):
        if values[name] is not None:
            values[name] = Path(values[name])
    return CheckSettings(**values)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it left in its group. An engine and Ray end with the process
    that started them."""
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
