"""The pipe between a run's supervisor and its driver: the driver's heartbeat, and the
reason of its end.

The supervisor reads lines; a line is a `Note` as JSON. A driver can be ended without
warning (Ray's C++ ends it when its raylet is gone), so it reports immediately, by a
write that needs no event loop.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from enum import StrEnum

import msgspec

_VARIABLE = "INVRL_LIFELINE"
BEAT_EVERY_S = 1.0


class NoteKind(StrEnum):
    BEAT = "beat"
    CAUSE = "cause"
    """Reason that the driver is about to end."""
    REPORTED = "reported"
    """The driver has shown the user why it ends."""
    FINAL = "final"
    """Another incarnation would fail in the same way."""
    FOLDER = "folder"
    """A temporary folder that must be removed when the incarnation is over."""
    BLOCKED = "blocked"
    """The driver is in a call, named by `text`, that no signal interrupts. An interrupt
    may kill it there."""
    FREE = "free"
    """The blocking call has returned."""
    ENDING = "ending"
    """All work is done and reported. `text` is the driver's exit code. The end of its
    interpreter may take long, without heartbeats."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    kind: NoteKind
    text: str = ""


class _Pipe:
    descriptor: int | None = None
    """Writing end, in a driver."""


def environment(descriptor: int) -> dict[str, str]:
    """Return the variables that the driver's process needs, in addition to the open
    descriptor."""
    return {_VARIABLE: str(descriptor)}


def hold() -> None:
    """Take the pipe over in the driver, so that no child of ours inherits it, and begin
    to beat.

    A thread beats, so a call that blocks the event loop for a while (Ray's start) does
    not count as death.
    """
    descriptor = os.environ.pop(_VARIABLE, "")
    if not descriptor:
        return
    _Pipe.descriptor = int(descriptor)
    os.set_inheritable(_Pipe.descriptor, False)
    # a stopped supervisor does not read: beats are lost then
    os.set_blocking(_Pipe.descriptor, False)
    tell(NoteKind.BEAT)
    threading.Thread(target=_beat, name="lifeline", daemon=True).start()


def is_held() -> bool:
    """Whether this process has a supervisor, which prints the driver's reports."""
    return _Pipe.descriptor is not None


def tell(kind: NoteKind, text: str = "") -> None:
    """Send a note to the supervisor. Does nothing in a process without one."""
    if _Pipe.descriptor is None:
        return
    line = msgspec.json.encode(Note(kind=kind, text=text)) + b"\n"
    with contextlib.suppress(
        OSError
    ):  # the supervisor is gone; the kernel ends this process too
        os.write(_Pipe.descriptor, line)


@contextlib.contextmanager
def blocked(what: str) -> Iterator[None]:
    """Mark a call that no signal interrupts, and during which killing this process
    loses nothing."""
    tell(NoteKind.BLOCKED, what)
    try:
        yield
    finally:
        tell(NoteKind.FREE)


def _beat() -> None:
    while True:
        time.sleep(BEAT_EVERY_S)
        tell(NoteKind.BEAT)


class Listener:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.descriptor, self.writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        self._unread = b""
        """Beginning of an incomplete line."""

    def opened_in_child(self) -> None:
        """Close our copy of the writing end after the child has its own."""
        os.close(self.writer)

    def notes(self) -> list[Note]:
        """Return the notes that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.descriptor, 65_536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        return [msgspec.json.decode(line, type=Note) for line in lines]

    def close(self) -> None:
        os.close(self.descriptor)
