"""`invrl watch`: a run in the terminal, live or dead. Nothing is written into the run's
folder."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from invrl.cli.arguments import (
    read_arguments,
    read_number,
    read_run_folder,
    unknown_flag,
)
from invrl.host.output.printable import printable
from invrl.observe.screen.step_text import describe_step
from invrl.observe.screen.watch_screen import screen
from invrl.observe.status.run_status import RunReader, RunStatus

_INTERVAL_FLAG = "--interval-s"
_ONCE_FLAG = "--once"
_PLAIN_WIDTH = 100
_KEY_POLL_S = 0.1


def watch(arguments: Sequence[str]) -> None:
    """usage: invrl watch RUN_FOLDER [--once] [--interval-s SECONDS]

    Shows a run that goes on, or has ended: the curve of rewards, the phases of its
    steps and what it waits for, engines and gateway, held-out results and the last
    failures. It reads the folder again every 2 seconds (--interval-s); q or Ctrl-C ends
    it, and never the run. --once prints one frame. Without a terminal it prints a
    frame, and then a line per step until the run ends."""
    flags = [_INTERVAL_FLAG, _ONCE_FLAG]
    options, runs = read_arguments(arguments, flags[:1], flags[1:])
    if len(runs) > 1:
        raise unknown_flag(runs[1], flags)
    folder = read_run_folder(runs)
    interval_s = read_number(
        _INTERVAL_FLAG,
        options.get(_INTERVAL_FLAG, "2"),
        reason="not between 0.1 and 3600 seconds",
        fix="give a number, such as 2",
        least=0.1,
        most=3600,
    )
    reader = RunReader(folder)
    is_live = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    console = Console(
        width=None if is_live else _pipe_width(), no_color=None if is_live else True
    )
    with contextlib.suppress(KeyboardInterrupt):
        if _ONCE_FLAG in options:
            _print_frame(console, reader.read())
        elif is_live:
            _show(console, reader, interval_s)
        else:
            _print_lines(console, reader, interval_s)


def _pipe_width() -> int:
    """Return COLUMNS, as other programs do; else a width sufficient for every part."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else _PLAIN_WIDTH


def _print_frame(console: Console, status: RunStatus) -> None:
    console.print(screen(status, console.size, now=time.time()))


def _show(console: Console, reader: RunReader, interval_s: float) -> None:
    """Show the live screen until q is pressed. It is an alternate screen, so that the
    terminal is restored afterwards; the last frame is printed there."""
    status = reader.read()
    with (
        _keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(screen(status, console.size, now=time.time()), refresh=True)
            if _quits(pressed, interval_s):
                break
            status = reader.read()
    _print_frame(console, status)


def _quits(has_keys: bool, seconds: float) -> bool:
    """Wait `seconds`, or until q is pressed."""
    deadline = time.monotonic() + seconds
    while (time_left := deadline - time.monotonic()) > 0:
        if not has_keys:
            time.sleep(time_left)
        elif select.select([sys.stdin], [], [], min(_KEY_POLL_S, time_left))[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False


@contextlib.contextmanager
def _keys() -> Iterator[bool]:
    """Read single keys without echo. Yields False if stdin is not a terminal."""
    if not sys.stdin.isatty():
        yield False
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _print_lines(console: Console, reader: RunReader, interval_s: float) -> None:
    """Print a frame, and then each step's new values: an evaluation comes after its
    step."""
    status = reader.read()
    _print_frame(console, status)
    shown = {row["step"]: row for row in status.rows}
    while status.state == "running":
        time.sleep(interval_s)
        status = reader.read()
        for row in status.rows:
            before = shown.get(row["step"], {})
            values = {
                name: value
                for name, value in row.items()
                if value is not None and name not in before
            }
            if values:
                text = describe_step(values, status.failed)
                print(printable(f"step {row['step']}: {text}"), flush=True)
        shown = {row["step"]: row for row in status.rows}
        if status.state != "running":
            print(printable(status.outcome), flush=True)
