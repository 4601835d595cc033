"""Asks a process again and again whether it is there, and says when it counts as dead.

Ray tells of a process that was killed. It does not tell of one that is stopped (SIGSTOP), or that hangs with
the interpreter's lock held: that one keeps its sockets, and whoever calls it waits. So each role has a method
that does nothing but answer, beside what it works on; silence for `run.heartbeat_timeout_s` is death."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil

from invrl.errors import ServerError

_GROUP = "beat"
_LOOKS = 30
"""Per timeout."""
_ASKS = 6
_BUSY = 0.2
"""CPUs: a process that uses more while it is silent works, in a library that holds the interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a process answers: who it is. `host` tells whether `pid` means anything here."""

    pid: int
    host: str


def pulse() -> Pulse:
    """Of this process."""
    return Pulse(pid=os.getpid(), host=os.uname().nodename)


def remote_with_beat(cls: type) -> Any:
    """The class as that of a Ray actor in which a thread of its own answers `beat`."""
    import ray  # late: who imports this file need not have prepared Ray's environment yet

    remote: Any = ray.remote
    return remote(concurrency_groups={_GROUP: 1})(cls)


async def beat_of(actor: Any) -> Pulse:
    """Of an actor of a class from `remote_with_beat`: it answers whatever its other methods do."""
    reference = actor.beat.options(concurrency_group=_GROUP).remote()
    return await asyncio.wrap_future(reference.future())


class ActorHeartbeat:
    """Of one process, called `name` in messages. `ask` returns its pulse, or raises: then it is the one who
    called its methods that learns of it, and asking goes on."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[Pulse]], *, timeout_s: float) -> None:
        self._name, self._ask, self._timeout_s = name, ask, timeout_s
        self._last: Pulse | None = None

    async def watch(self) -> None:
        """Returns never. Raises ServerError that names the process once it counts as dead; where it runs on
        this machine it has been killed by then, so that nothing waits for it any more."""
        while True:
            question = asyncio.ensure_future(self._ask())
            try:
                await self._wait(question)
            finally:
                question.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await question
            await asyncio.sleep(self._timeout_s / _ASKS)

    async def _wait(self, question: "asyncio.Future[Pulse]") -> None:
        silent_s = 0.0
        look_s = self._timeout_s / _LOOKS
        last = time.monotonic()
        cpu_s = self._cpu_s()
        while not question.done():
            await asyncio.wait({question}, timeout=look_s)
            now = time.monotonic()
            # A long gap means that this process was stopped, or its event loop: no fault of the other's.
            silent_s += min(now - last, 2 * look_s)
            last = now
            if silent_s > self._timeout_s and not question.done():
                used_s = self._cpu_s() - cpu_s
                if used_s > _BUSY * silent_s:
                    silent_s, cpu_s = 0.0, self._cpu_s()
                    continue
                self._kill()
                raise ServerError(
                    f"{self._name}{self._where()} has not answered for {silent_s:.0f} s "
                    "(run.heartbeat_timeout_s), so it counts as dead"
                )
        if not question.cancelled() and question.exception() is None:
            self._last = question.result()

    def _local_pid(self) -> int | None:
        here = self._last is not None and self._last.host == os.uname().nodename
        return self._last.pid if here and self._last is not None else None

    def _where(self) -> str:
        return f" (process {self._last.pid} on {self._last.host})" if self._last is not None else ""

    def _cpu_s(self) -> float:
        pid = self._local_pid()
        if pid is not None:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                return times.user + times.system
        return 0.0

    def _kill(self) -> None:
        """Ray asks a worker to end itself, which one that is stopped does not hear."""
        pid = self._local_pid()
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
