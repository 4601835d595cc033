"""The lines of this process's live display at the end of the terminal, for text that
bypasses the display: what a signal handler writes directly to the terminal.

Invariant: nothing here takes a lock, so that a signal handler may call it at any
instruction.
"""

import os

_ERASE_LINE = "\r\x1b[2K"
_UP = "\x1b[1A"


class _State:
    count = 0


def drawn(count: int) -> None:
    """Record that a live display has drawn `count` lines, with the cursor in the last
    of them. 0: there is none."""
    _State.count = count


def past_display(text: str, descriptor: int) -> str:
    """Return `text`, which ends with a new line, in the form for the terminal
    `descriptor`: it replaces the display, which redraws itself below. Unchanged if
    nothing is displayed or the descriptor is not a terminal."""
    count = _State.count
    if not count or not os.isatty(descriptor):
        return text
    erased = _ERASE_LINE + (_UP + _ERASE_LINE) * (count - 1)
    return erased + text + "\n" * (count - 1)
