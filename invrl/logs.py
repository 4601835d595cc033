"""Logging of one of our processes: everything to its own file. Called once at the start of each process; the
logs of servers that are not ours are written by `process.ServerProcess`."""

from __future__ import annotations

import logging
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def log_to(path: Path) -> None:
    """Send this process's log records to `path` (appended). Replaces earlier handlers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=path, level=logging.INFO, format=_FORMAT, force=True)
    for chatty in ("httpx", "httpcore", "matplotlib", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
