"""What a Ray actor's process prints and logs, in the two files that Ray has opened for
it.

Ray names these files by numbers, so their first lines say which process of which run it
is. Keys are masked in what Python prints or logs, but not in what a child process
prints."""

import sys

from invrl.host.log_lines import LogSettings, write_log_lines
from invrl.host.masked_text import MaskedText

PROCESS_MARK = ":process:"
"""The beginning of that line, beside those that Ray begins its files with."""


def mark_files(process: str, settings: LogSettings) -> None:
    """Writes the line that says which process it is into both files."""
    for stream in (sys.stdout, sys.stderr):
        print(f"{PROCESS_MARK}{process} of run {settings.run}", file=stream, flush=True)


def begin_output(process: str, settings: LogSettings) -> None:
    """To be called in the actor's process. What it logs goes to its standard error, in
    our format."""
    sys.stdout = MaskedText(1)
    sys.stderr = MaskedText(2)
    mark_files(process, settings)
    write_log_lines(process, settings)
