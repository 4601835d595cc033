"""Keys from the environment, and their removal from it before user code runs.

Child processes inherit the environment, so a key in it reaches every tool that user
code runs. A command therefore first moves the keys into memory (`hold_keys`), because
its checks import user code too. Only processes that need the keys have them in their
environment: a driver gets them from its supervisor, and Ray's own processes get Ray's
token when they start.

Limits: user code runs as the same user as the run. It may read files, memory, and the
environments of other processes (those of the raylet, the GCS, and Ray's workers until
our actor begins hold Ray's token). Untrusted code needs separate users or a sandbox.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_KEY = "INVRL_ENV_KEY"
ENGINE_KEY = "INVRL_ENGINE_KEY"
"""Key of engines that `invrl engine` starts."""
TEACHER_KEY = "INVRL_TEACHER_KEY"
"""Key of the teacher's server."""
RAY_TOKEN = "RAY_AUTH_TOKEN"
_NAMES = (ENVIRONMENT_KEY, ENGINE_KEY, TEACHER_KEY, RAY_TOKEN)
_ENV_START_FIELD = 50
"""Number of `env_start` in /proc/PID/stat, as in proc(5); `env_end` follows."""
_ENV_END_FIELD = 51
_FIRST_FIELD_AFTER_NAME = 3

_HELD: dict[str, str] = {}
"""Keys by name that this process knows and its environment lacks."""


def hold_keys() -> None:
    """Move the keys from the environment into memory, at the beginning of a command."""
    for name in _NAMES:
        _HELD.pop(name, None)  # held for an earlier command in this process
        if name in os.environ:
            hold_key(name, os.environ[name])


def hold_key(name: str, value: str) -> None:
    """Keep the key in memory, and remove it from the environment."""
    _HELD[name] = value
    forget_keys(name)


def held_key(name: str) -> str | None:
    """Return the key; None if the user gave none."""
    return os.environ.get(name, _HELD.get(name))


def held_keys() -> Mapping[str, str]:
    """Return the variables that give the keys to a process of ours, in addition to this
    one's environment."""
    return dict(_HELD)


@contextmanager
def key_in_environment(name: str) -> Iterator[None]:
    """Let processes started within the block inherit the key, if this process has
    it."""
    value = held_key(name)
    if value is None:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        hold_key(name, value)


def take_environment_key() -> str:
    """Return the key that opens sessions, or "" if the user gave none. This process no
    longer has it then."""
    return _take(ENVIRONMENT_KEY)


def take_engine_key() -> str:
    """Return the key of external engines, or "" if the user gave none. This process no
    longer has it then."""
    return _take(ENGINE_KEY)


def _take(name: str) -> str:
    key = held_key(name)
    forget_keys(name)
    _HELD.pop(name, None)
    return key or ""


def forget_keys(*names: str) -> None:
    """Remove keys, all of them without `names`, from the environment and from
    /proc/PID/environ.

    Later child processes do not inherit them. Ray has read its token before user code
    is loaded, and does not need it again.
    """
    for name in names or _NAMES:
        value = os.environ.pop(name, "")
        if value:
            _overwrite(f"{name}={value}".encode())


def _overwrite(entry: bytes) -> None:
    """Overwrite the value in the memory that the kernel shows as this process's initial
    environment."""
    fields = (
        Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    )
    start = int(fields[_ENV_START_FIELD - _FIRST_FIELD_AFTER_NAME])
    end = int(fields[_ENV_END_FIELD - _FIRST_FIELD_AFTER_NAME])
    if start == 0:
        return
    # A zero byte ends each entry. With one before the first entry, an offset in
    # `entries` is that of a zero byte, and the entry's offset in the environment.
    entries = b"\0" + ctypes.string_at(start, end - start)
    offset = entries.find(b"\0" + entry + b"\0")
    if offset >= 0:
        name_length = entry.index(b"=") + 1
        ctypes.memset(start + offset + name_length, ord("x"), len(entry) - name_length)
