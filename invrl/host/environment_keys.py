"""Keys that processes are given by their environment, and how they leave it again before user code runs.

What a process starts inherits its environment: a key that stays there is in every tool that user code runs.
So a command takes them into its memory before anything else (`hold_keys`): its checks import user code too.
They are in an environment again only for the process that needs them: a driver gets them from its supervisor,
and Ray's own processes get Ray's token while they are started.
What this cannot do: user code runs as the same user as the run, and may read other processes' environments
(the raylet's and the GCS' hold Ray's token, and so do Ray's workers until our actor in them begins), memory,
and files. Separate users or a sandbox are the answer to code that is not trusted."""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_KEY = "INVRL_ENV_KEY"
RAY_TOKEN = "RAY_AUTH_TOKEN"
_START_FIELD = 50
"""Of /proc/PID/stat, as proc(5) numbers them: `env_start`; `env_end` follows."""


_HELD: dict[str, str] = {}
"""By name: what this process knows and its environment does not have."""


def hold_keys() -> None:
    """At the beginning of a command: the keys that it was given are in its memory only after this."""
    for name in (ENVIRONMENT_KEY, RAY_TOKEN):
        _HELD.pop(name, None)  # of an earlier command in this process
        if name in os.environ:
            hold_key(name, os.environ[name])


def hold_key(name: str, value: str) -> None:
    """In memory, and not in the environment."""
    _HELD[name] = value
    forget_keys(name)


def held_key(name: str) -> str | None:
    """None where the user gave none."""
    return os.environ.get(name, _HELD.get(name))


def held_keys() -> Mapping[str, str]:
    """What the environment of a process of ours needs beside this one's, if it is to have the keys."""
    return dict(_HELD)


@contextmanager
def key_in_environment(name: str) -> Iterator[None]:
    """Where this process has the key, what it starts within the block inherits it."""
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
    """The key that opens sessions, "" if the user gave none. This process does not hold it after this."""
    key = held_key(ENVIRONMENT_KEY)
    forget_keys(ENVIRONMENT_KEY)
    _HELD.pop(ENVIRONMENT_KEY, None)
    return key or ""


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
