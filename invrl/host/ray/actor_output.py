"""Output and logs of a Ray actor's process, in the two files that Ray has opened for
it.

Ray names these files by numbers, so their first lines identify process and run. Keys
are masked in output from Python, but not in that of child processes.
"""

import sys

from invrl.host.output.log_lines import LogSettings, write_log_lines
from invrl.host.output.masked_text import mask_output

PROCESS_MARK = ":process:"
"""Beginning of that line, as distinct from those with which Ray begins its files."""


def mark_files(process: str, settings: LogSettings) -> None:
    """Write the line that identifies the process into both files."""
    for stream in (sys.stdout, sys.stderr):
        print(f"{PROCESS_MARK}{process} of run {settings.run}", file=stream, flush=True)


def begin_output(process: str, settings: LogSettings) -> None:
    """Set up the output. Call this in the actor's process. Its log goes to its standard
    error, in our format."""
    mask_output()
    mark_files(process, settings)
    write_log_lines(process, settings)
