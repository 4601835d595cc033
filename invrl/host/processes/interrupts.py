"""SIGINT, SIGTERM and SIGHUP: the first one begins the clean-up, later ones change
nothing, and a deadline ends the process.

Invariant: no signal raises an exception inside a loop that `run` runs. asyncio's own
runner raises at the second SIGINT, which can hit any callback, even one whose result
the clean-up waits for.
"""

import _thread
import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import psutil

from invrl.host.output.live_lines import past_display

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
DEADLINE_S = 120.0
"""Seconds from the first interrupt to the end of this process. A server that hangs
takes 65 s of it."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _State:
    received = itertools.count(1)
    interrupted = False
    cleans_up = False
    more_s = 0.0
    task: asyncio.Task[Any] | None = None


class CleanUp(contextlib.AsyncExitStack):
    """An exit stack whose exit even the first interrupt does not cut short."""

    async def __aexit__(self, *error: Any) -> bool | None:
        _State.cleans_up = True
        return await super().__aexit__(*error)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as `asyncio.run` does, in the main thread. After an interrupt it
    always raises KeyboardInterrupt."""
    try:
        runner = asyncio.Runner()
        loop = runner.get_loop()
        with _woken(loop), runner:
            _State.cleans_up = False
            _State.task = loop.create_task(work)
            return loop.run_until_complete(_State.task)
    except Exception:
        if _State.interrupted:
            _LOG.exception("failed when it was interrupted, or before")
        raise
    finally:
        _State.task = None
        if _State.interrupted:
            # with a handler of ours, the interpreter's end puts the default back
            catch(signal.SIG_IGN)
            raise KeyboardInterrupt


@contextlib.contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let a signal that arrives just before the loop begins to wait end that wait.

    Python itself calls handlers only between two of its instructions.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        previous = -1
        try:
            previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            yield
        finally:
            signal.set_wakeup_fd(previous)
            if not loop.is_closed():
                loop.remove_reader(reader)


def _interrupt(_number: int, _frame: object) -> None:
    """Handle a signal. Another one may come at any line of it."""
    signal.alarm(
        0
    )  # Ray's own handler of SIGTERM, if it came first, would end the process in 3 s
    count = next(_State.received)
    task = _State.task
    if count == 1:
        _State.interrupted = True
        # `threading` takes locks that the interrupted code may hold.
        _thread.start_new_thread(_end_after_deadline, ())
        if task is None:
            raise KeyboardInterrupt
        if not _State.cleans_up and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)
    elif count == 2:
        allowed_s = DEADLINE_S + _State.more_s
        _say(
            f"ending; what is left after {allowed_s:g} s is killed (at once: kill -9 {os.getpid()})"
        )


def catch(handler: Any = _interrupt) -> None:
    """Handle signals from now on. Raises KeyboardInterrupt at a signal while no loop
    runs."""
    for number in _SIGNALS:
        is_ignored_hangup = (
            number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        )  # `nohup`
        if not is_ignored_hangup:
            signal.signal(number, handler)


def allow_more(seconds: float) -> None:
    """Extend the deadline by the seconds that the current work may take."""
    _State.more_s += seconds


def _end_after_deadline() -> None:
    """End this process; the kernel and the guardian then end what it started."""
    allowed_s = DEADLINE_S
    slept_s = 0.0
    while slept_s < allowed_s:
        time.sleep(allowed_s - slept_s)
        slept_s = allowed_s
        allowed_s = DEADLINE_S + _State.more_s
    try:
        task = _State.task
        tasks = asyncio.all_tasks(task.get_loop()) if task else ()
        awaited = [str(other.get_coro()) for other in tasks]
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a zombie has no command
                awaited.append(" ".join(child.cmdline()[1:3]))
        _say(
            f"killed, {slept_s:g} s after the interrupt; it waited for {', '.join(awaited)}, "
            "and its threads were in"
        )
        faulthandler.dump_traceback()
    finally:
        os._exit(1)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        text = past_display(f"invrl: {message}\n", 2)
        os.write(2, text.encode())  # the signal may have interrupted `print`
