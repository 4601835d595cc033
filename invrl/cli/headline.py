"""An error as the terminal shows it: what happened in one line, and what to do about it. The log has the
details: tracebacks, what other processes raised, the last lines of their logs."""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import InvrlError

_MAX_CHARS = 700
_FIX = ". Fix: "
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|OutOfMemory)\b.*")
"""A line of a traceback, or of a log, that says what was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    reason: str
    fix: str = ""

    def lines(self, log: Path) -> list[str]:
        """Two: the reason; the fix, if there is one, and where the rest is."""
        fix = f"fix: {self.fix}; " if self.fix else ""
        return [self.reason, f"  {fix}log: {log}"]


def headline(error: BaseException) -> Headline:
    """Of the error itself, where Ray has wrapped it in one of its own."""
    error = _unwrapped(error)
    text = _COLOUR.sub("", str(error)).strip()
    before, _, after = text.rpartition(_FIX)  # what user code is quoted with may hold a fix of its own
    reason = _one_line(before or after)
    fix = _one_line(after) if before else ""
    if not isinstance(error, InvrlError):
        reason = f"{type(error).__name__}: {reason}{_place(error)}"
    return Headline(reason=reason, fix=fix)


def _unwrapped(error: BaseException) -> BaseException:
    """What an actor raised comes as an error of Ray's, whose text is the whole traceback. Ray need not be
    imported here: a command without it fails too."""
    cause = getattr(error, "cause", None)
    made_by_ray = any(kind.__module__.startswith("ray.") for kind in type(error).__mro__)
    if made_by_ray and isinstance(cause, BaseException):
        return cause
    return error


def _one_line(text: str) -> str:
    """The first line; where more follow, also the last of them that says what was raised."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    raised = [line for line in lines[1:] if _RAISED.match(line)]
    line = lines[0]
    if raised:
        line += f" {raised[-1]}"
    elif len(lines) > 1:
        line += f" {lines[-1]}"
    if len(line) > _MAX_CHARS:
        return f"{line[:_MAX_CHARS]}..."
    return line


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
