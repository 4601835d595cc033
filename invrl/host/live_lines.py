"""The lines at the end of the terminal that a live display of this process draws again
and again, for text that goes past the display: what a signal handler writes to the
terminal itself.

Invariant: nothing here takes a lock, so that a signal handler may call it at any
instruction."""

import os

_ERASE_LINE = "\r\x1b[2K"
_UP = "\x1b[1A"


class _State:
    count = 0


def drawn(count: int) -> None:
    """A live display has drawn so many lines, and the cursor is in the last of them. 0:
    there is none."""
    _State.count = count


def past_display(text: str, descriptor: int) -> str:
    """`text`, which ends with a new line, as it is to be written to the terminal
    `descriptor`: in place of the display, which draws itself again below it. Unchanged
    where nothing is displayed or the descriptor is no terminal."""
    count = _State.count
    if not count or not os.isatty(descriptor):
        return text
    erased = _ERASE_LINE + (_UP + _ERASE_LINE) * (count - 1)
    return erased + text + "\n" * (count - 1)
