"""What a stage reports while it runs: lines of its standard output, which is its
log."""

import json
import time

_STARTED = time.monotonic()
_MARK = "RESULT "
_SKIPPED_MARK = "SKIPPED "


class StageSkipped(Exception):
    """The stage cannot run here, for the reason that the message gives."""


def emit(**values: object) -> None:
    """Report figures, with the seconds since the stage began. What was reported before
    a failure is kept."""
    print(
        _MARK + json.dumps({"at_s": round(time.monotonic() - _STARTED, 1), **values}),
        flush=True,
    )


def emit_skipped(reason: str) -> None:
    print(_SKIPPED_MARK + reason, flush=True)


def emitted(log: str) -> list[dict[str, object]]:
    """The figures in a log."""
    return [
        json.loads(line.removeprefix(_MARK))
        for line in log.splitlines()
        if line.startswith(_MARK)
    ]


def skip_reason(log: str) -> str | None:
    for line in log.splitlines():
        if line.startswith(_SKIPPED_MARK):
            return line.removeprefix(_SKIPPED_MARK)
    return None
