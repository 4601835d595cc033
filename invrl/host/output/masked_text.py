"""A text stream of a process, with keys masked."""

import io
import sys

from invrl.host.output.masked_keys import without_keys


class MaskedText(io.TextIOWrapper):
    """A line-buffered text stream to a file descriptor, which masks keys. It does not
    close the descriptor."""

    def __init__(self, descriptor: int) -> None:
        raw = io.FileIO(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )

    def write(self, text: str) -> int:
        super().write(without_keys(text))
        return len(text)


def mask_output() -> None:
    """Mask keys in what Python prints in this process from now on."""
    sys.stdout = MaskedText(1)
    sys.stderr = MaskedText(2)
