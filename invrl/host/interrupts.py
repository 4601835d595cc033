"""INT, TERM and HUP: the first begins the clean-up, later ones change nothing, and there is a deadline.

Invariant: no signal raises in a loop that `run` runs. At the second SIGINT asyncio's own runner does, and
with the callback it hits may be lost what the clean-up waits for."""

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

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
DEADLINE_S = 120.0
"""From the first interrupt to the end of this process; a server that hangs takes 65 s of it."""


class _State:
    received = itertools.count(1)
    interrupted = False
    cleans_up = False
    more_s = 0.0
    task: asyncio.Task[Any] | None = None


class CleanUp(contextlib.AsyncExitStack):
    """An exit stack whose end the first interrupt does not cut short either."""

    async def __aexit__(self, *error: Any) -> bool | None:
        _State.cleans_up = True
        return await super().__aexit__(*error)


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in the main thread. After an interrupt it raises KeyboardInterrupt in any case."""
    try:
        runner = asyncio.Runner()
        with _woken(runner.get_loop()), runner:
            _State.cleans_up, _State.task = False, runner.get_loop().create_task(work)
            return runner.get_loop().run_until_complete(_State.task)
    except Exception:
        if _State.interrupted:
            _LOG.exception("failed when it was interrupted, or before")
        raise
    finally:
        _State.task = None
        if _State.interrupted:
            catch(signal.SIG_IGN)  # where there is a handler, the interpreter's end puts the default back
            raise KeyboardInterrupt


@contextlib.contextmanager
def _woken(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """A signal that comes just before the loop begins to wait ends that wait: Python itself calls handlers
    between two of its instructions only."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, 4096)
        before = -1
        try:
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            yield
        finally:
            signal.set_wakeup_fd(before)
            if not loop.is_closed():
                loop.remove_reader(reader)


def _interrupt(_number: int, _frame: object) -> None:
    signal.alarm(0)  # Ray's own handler of TERM, were it first, ends the process by this in 3 s
    nth, task = next(_State.received), _State.task  # the next one may come at any line of this
    if nth == 1:
        _State.interrupted = True
        _thread.start_new_thread(_end_late, ())  # `threading` takes locks that the interrupted code may hold
        if task is None:
            raise KeyboardInterrupt
        if not (_State.cleans_up or task.done()):
            task.get_loop().call_soon_threadsafe(task.cancel)
    elif nth == 2:
        allowed_s = DEADLINE_S + _State.more_s
        _say(f"ending; what is left after {allowed_s:g} s is killed (at once: kill -9 {os.getpid()})")


def catch(handler: Any = _interrupt) -> None:
    """From here on; KeyboardInterrupt where no loop runs."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup`
            signal.signal(number, handler)


def allow_more(seconds: float) -> None:
    """What is done now before the end may take so long; the deadline is put off by it."""
    _State.more_s += seconds


def _end_late() -> None:
    """The kernel and the guardian then end what this process started."""
    allowed_s = DEADLINE_S
    slept_s = 0.0
    while slept_s < allowed_s:
        time.sleep(allowed_s - slept_s)
        slept_s = allowed_s
        allowed_s = DEADLINE_S + _State.more_s
    try:
        tasks = asyncio.all_tasks(_State.task.get_loop()) if _State.task else ()
        left = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a zombie has no command
                left.append(" ".join(child.cmdline()[1:3]))
        waits = ", ".join([*(str(task.get_coro()) for task in tasks), *left])
        _say(f"killed, {slept_s:g} s after the interrupt; it waited for {waits}, and its threads were in")
        faulthandler.dump_traceback()
    finally:
        os._exit(1)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"invrl: {message}\n".encode())  # `print` may be what was interrupted
