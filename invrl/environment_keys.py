"""Keys that processes are given by their environment, and how they leave it again before user code runs.

What a process starts inherits its environment: a key that stays there is in every tool that user code runs.
What this cannot do: user code runs as the same user as the run, and may read other processes' environments
(the raylet's holds Ray's token). Separate users or a sandbox are the answer to code that is not trusted."""

import ctypes
import os
from pathlib import Path

ENVIRONMENT_KEY = "INVRL_ENV_KEY"
RAY_TOKEN = "RAY_AUTH_TOKEN"
_START_FIELD = 50
"""Of /proc/PID/stat, as proc(5) numbers them: `env_start`; `env_end` follows."""


def take_environment_key() -> str:
    """The key that opens sessions, "" if the user gave none. It is in no environment after this."""
    key = os.environ.get(ENVIRONMENT_KEY, "")
    forget_keys(ENVIRONMENT_KEY)
    return key


def forget_keys(*names: str) -> None:
    """What this process starts from now on does not have them, nor does its /proc/PID/environ. Ray has read
    its token when user code is loaded, and needs it no more. Without `names`: every key of a run."""
    for name in names or (ENVIRONMENT_KEY, RAY_TOKEN):
        value = os.environ.pop(name, "")
        if value:
            _overwrite(f"{name}={value}".encode())


def _overwrite(entry: bytes) -> None:
    """In the memory that the kernel shows as the environment that this process began with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # The first field after the name in parentheses is number 3.
    start, end = (int(fields[number - 3]) for number in (_START_FIELD, _START_FIELD + 1))
    if not start:
        return
    shown = b"\0" + ctypes.string_at(start, end - start)
    at = shown.find(b"\0" + entry + b"\0")
    if at >= 0:
        value_at = start + at + entry.index(b"=") + 1
        ctypes.memset(value_at, ord("x"), len(entry) - entry.index(b"=") - 1)
