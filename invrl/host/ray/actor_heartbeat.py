"""The heartbeat of a Ray actor: polls it for signs of life, and decides when it counts
as dead.

Not to be confused with `engines/fleet/engine_health.py` (engines and the router, over
HTTP) and with `gateway/server/processes/heartbeat_page.py` (the gateway's processes, in
shared memory).

Ray reports an actor's process that was killed. It does not report one that is stopped
(SIGSTOP), or that hangs while it holds the interpreter's lock: that one keeps its
sockets, and its callers wait. So each actor class has a method that only answers,
alongside the actor's work. Silence for `run.heartbeat_timeout_s` is death.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil

from invrl.errors import ServerError
from invrl.host.processes.awake_time import Stopwatch

_LOOKS_PER_TIMEOUT = 30
_QUESTIONS_PER_TIMEOUT = 6
_BUSY = 0.2
"""CPUs. A silent process that uses more is working in a library that holds the
interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Identity of a process that answers. `pid` is meaningful here only if `host` is
    this machine."""

    pid: int
    host: str


def pulse() -> Pulse:
    """Return the pulse of this process."""
    return Pulse(pid=os.getpid(), host=os.uname().nodename)


class ActorHeartbeat:
    """Watches one actor, called `name` in messages.

    `ask` returns its pulse. It may raise, and is then called again: the caller of the
    actor's other methods sees such an error.
    """

    def __init__(
        self, name: str, ask: Callable[[], Awaitable[Pulse]], *, timeout_s: float
    ) -> None:
        self._name = name
        self._ask = ask
        self._timeout_s = timeout_s
        self._last_pulse: Pulse | None = None

    async def watch(self) -> None:
        """Watch the actor. Never returns; raises ServerError that names the process
        once it counts as dead.

        A process on this machine has been killed by then, so nothing waits for it any
        more.
        """
        while True:
            question = asyncio.ensure_future(self._ask())
            try:
                await self._wait_for(question)
            finally:
                question.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await question
            await asyncio.sleep(self._timeout_s / _QUESTIONS_PER_TIMEOUT)

    async def _wait_for(self, question: "asyncio.Future[Pulse]") -> None:
        silent_s = 0.0
        look_interval_s = self._timeout_s / _LOOKS_PER_TIMEOUT
        stopwatch = Stopwatch(longest_gap_s=2 * look_interval_s)
        cpu_s_before = self._cpu_s()
        while not question.done():
            await asyncio.wait({question}, timeout=look_interval_s)
            silent_s += stopwatch.lap_s()
            if question.done() or silent_s <= self._timeout_s:
                continue
            cpu_s = self._cpu_s()
            if cpu_s - cpu_s_before > _BUSY * silent_s:
                silent_s = 0.0
                cpu_s_before = cpu_s
                continue
            self._kill()
            raise ServerError(
                f"{self._name}{self._place()} has not answered for {silent_s:.0f} s "
                "(run.heartbeat_timeout_s), so it counts as dead"
            )
        if not question.cancelled() and question.exception() is None:
            self._last_pulse = question.result()

    def _local_pid(self) -> int | None:
        """Return the pid; None if the process is on another machine, or has never
        answered."""
        pulse = self._last_pulse
        if pulse is None or pulse.host != os.uname().nodename:
            return None
        return pulse.pid

    def _place(self) -> str:
        pulse = self._last_pulse
        if pulse is None:
            return ""
        return f" (process {pulse.pid} on {pulse.host})"

    def _cpu_s(self) -> float:
        pid = self._local_pid()
        if pid is not None:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                return times.user + times.system
        return 0.0

    def _kill(self) -> None:
        """Kill the process. Ray asks a worker to end itself, which a stopped worker
        does not do."""
        pid = self._local_pid()
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
