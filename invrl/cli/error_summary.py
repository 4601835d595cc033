"""An error as the terminal shows it: the reason in one line, and the fix. The log has
the details: tracebacks, errors of other processes, the last lines of their logs."""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

from invrl.errors import InvrlError
from invrl.observe.status.outcome import RAISED

_MAX_CHARS = 700
_FIX = ". Fix: "
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    reason: str
    fix: str = ""

    def lines(self, log: Path) -> list[str]:
        """Return two lines: the reason, then the fix, if there is one, and the path of
        the log."""
        if not self.fix:
            return [self.reason, f"  log: {log}"]
        return [self.reason, f"  fix: {self.fix}; log: {log}"]


def summarize_error(error: BaseException) -> ErrorSummary:
    """Return the summary of an error. For an error that Ray has wrapped, it is that of
    the inner error."""
    error = _unwrapped(error)
    text = _COLOUR.sub("", str(error)).strip()
    # The fix is the last one in the text: a quoted error of user code may have one,
    # too.
    reason, _, fix = text.rpartition(_FIX)
    if not reason:
        reason = fix
        fix = ""
    reason = _one_line(reason)
    if not isinstance(error, InvrlError):
        reason = f"{type(error).__name__}: {reason}{_place(error)}"
    return ErrorSummary(reason=reason, fix=_one_line(fix))


def _unwrapped(error: BaseException) -> BaseException:
    """Return the exception that an actor raised, without Ray's exception around it,
    whose text is a whole traceback. Ray is recognised by the module's name, because
    commands that do not import Ray use this too."""
    cause = getattr(error, "cause", None)
    made_by_ray = any(
        kind.__module__.startswith("ray.") for kind in type(error).__mro__
    )
    if made_by_ray and isinstance(cause, BaseException):
        return cause
    return error


def _one_line(text: str) -> str:
    """Return the first line of the text, and the last line that names an exception. If
    none does, the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    raised = [line for line in lines[1:] if RAISED.match(line)]
    shortened = lines[0]
    if raised:
        shortened += f" {raised[-1]}"
    elif len(lines) > 1:
        shortened += f" {lines[-1]}"
    if len(shortened) > _MAX_CHARS:
        return f"{shortened[:_MAX_CHARS]}..."
    return shortened


def _place(error: BaseException) -> str:
    """Return the file and the line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
