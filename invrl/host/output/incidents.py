"""Incidents: failures in a run's own processes, as lines for the person at the console.

The run continues, so nothing else would show them there. An incident is a record of the
logger `incidents`, and so also appears in its process's log.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from invrl.host.output.masked_keys import without_keys

incidents = logging.getLogger("invrl.incidents")


class _Shown(logging.Handler):
    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line: the log has the others."""
        first_line, _, rest = record.getMessage().partition("\n")
        more = " (the log has more)" if rest else ""
        self._show(without_keys(f"warning: {first_line}{more}"))


@contextmanager
def incidents_shown(show: Callable[[str], object]) -> Iterator[None]:
    """Give `show` a line for each incident of this process within the block."""
    handler = _Shown(show)
    incidents.addHandler(handler)
    try:
        yield
    finally:
        incidents.removeHandler(handler)
