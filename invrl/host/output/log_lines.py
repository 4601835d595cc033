"""The lines that our own processes log: time, level, process, run, session where there
is one, and message.

A line is text or a JSON object. Invariant: keys are masked in the whole line, after the
traceback was rendered.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from invrl.host.output.masked_keys import without_keys

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CHATTY_LOGGERS = ("httpx", "httpcore", "matplotlib", "asyncio", "urllib3")
"""Libraries that log every request at the level `info`."""
session_of_task: ContextVar[str] = ContextVar("session_of_task", default="")
"""Id of the session that the current task works for; "" if there is none. Its child
tasks inherit it."""


class LogSettings(BaseModel):
    """Log format and level of all processes of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = ""
    format: LogFormat = "text"
    level: LogLevel = "info"


class LineFormatter(logging.Formatter):
    """Formats a record as a line. `process`: the process's name in its lines."""

    def __init__(self, process: str, settings: LogSettings) -> None:
        super().__init__()
        self._process = process
        self._settings = settings

    def format(self, record: logging.LogRecord) -> str:
        if self._settings.format == "json":
            return self._json(record)
        names = [self._process]
        if self._settings.run:
            names.append(f"run={self._settings.run}")
        session = session_of_task.get()
        if session:
            names.append(f"session={session}")
        head = (
            f"{_time(record)} {record.levelname[0]} {' '.join(names)} {record.name}: "
        )
        return without_keys(
            "\n".join([head + record.getMessage(), *self._details(record)])
        )

    def _json(self, record: logging.LogRecord) -> str:
        """Return a JSON line. Keys are masked before the text is quoted, because
        quoting changes the characters around a key."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "run": self._settings.run,
        }
        session = session_of_task.get()
        if session:
            line["session"] = session
        line["logger"] = record.name
        line["message"] = without_keys(record.getMessage())
        details = self._details(record)
        if details:
            line["traceback"] = without_keys("\n".join(details))
        return json.dumps(line)

    def _details(self, record: logging.LogRecord) -> list[str]:
        """Return traceback and stack, rendered."""
        details: list[str] = []
        if record.exc_info:
            details.append(self.formatException(record.exc_info))
        elif record.exc_text:
            details.append(record.exc_text)
        if record.stack_info:
            details.append(self.formatStack(record.stack_info))
        return details


def write_log_lines(
    process: str, settings: LogSettings, *, file: Path | None = None
) -> None:
    """Send this process's log to `file`, or to its standard error. A later call
    replaces an earlier one, for example in a forked process."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(LineFormatter(process, settings))
    handler.handleError = partial(_handle_error, handler)
    logging.basicConfig(handlers=[handler], level=settings.level.upper(), force=True)
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(
            max(logging.WARNING, logging.getLogger().level)
        )


def _handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Drop a line that cannot be written: a traceback for each would flood the console
    on a full disk."""
    if not isinstance(sys.exception(), OSError):
        logging.Handler.handleError(handler, record)


def _time(record: logging.LogRecord) -> str:
    """Return the time in UTC, in milliseconds."""
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
