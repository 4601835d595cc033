"""Logging of one of our processes: everything to its own file, warnings to stderr as well where a person
watches. Called once at the start of each process; the logs of servers that are not ours are written by
`process.ServerProcess`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def log_to(path: Path, *, to_stderr: bool = False, level: int = logging.INFO) -> None:
    """Send this process's log records to `path` (appended). Replaces earlier handlers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter(_FORMAT))
    handlers: list[logging.Handler] = [file]
    if to_stderr:
        screen = logging.StreamHandler(sys.stderr)
        screen.setLevel(logging.WARNING)
        screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers.append(screen)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    for chatty in ("httpx", "httpcore", "matplotlib", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
