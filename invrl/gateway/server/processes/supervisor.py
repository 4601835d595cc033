"""The gateway's supervisor: loads slow parts once, forks the workers, and replaces a
worker that dies or hangs.

Invariants: the supervisor has no thread and no event loop, so that a fork copies a
consistent process. Workers die with it (PR_SET_PDEATHSIG), and it dies with the process
that started it. The sockets belong to that process: while nobody accepts, connections
wait in the kernel. SIGTERM ends all workers in good order; Ctrl-C is handled by the
parent process.
"""

import gc
import logging
import mmap
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from invrl.errors import ServerError
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers, choose_parsers
from invrl.gateway.server.processes.gateway_worker import serve
from invrl.gateway.server.processes.heartbeat_page import (
    SUPERVISOR,
    HeartbeatPage,
    SilenceWatch,
    WorkerHeartbeats,
    beat_interval_s,
    worker_place,
)
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.processes.awake_time import AwakeClock
from invrl.host.processes.descendants import die_with_parent
from invrl.host.processes.process import RestartLimit
from invrl.store.schema import connect

_log = logging.getLogger(__name__)
_RESTARTS_PER_MINUTE = 10
"""Limit for each worker."""


def supervise(
    settings: GatewaySettings,
    listener: socket.socket,
    own_sockets: Sequence[socket.socket],
    heartbeats: HeartbeatPage,
) -> None:
    """Run the workers until SIGTERM, and return when all of them have ended. Raises
    ServerError if a worker dies again and again. `own_sockets` has a loopback socket
    for each worker, if there are several workers."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    )
    renderer = load_renderer(
        settings.model_path,
        settings.vocab_size,
        chat_template=settings.chat_template_path,
        keep_thinking=settings.keep_thinking,
        special_tokens_in_content=settings.special_tokens_in_content,
    )
    renderer.preload()
    parsers = choose_parsers(
        settings.tool_call_parser,
        settings.reasoning_parser,
        renderer,
    )
    parsers.preload()
    # creates the file before several workers open it at once
    connect(Path(settings.store_path)).close()
    workers = _Workers(settings, renderer, parsers, listener, own_sockets, heartbeats)
    gc.freeze()  # keeps the objects that all workers share in shared pages
    while True:
        heartbeats.beat(SUPERVISOR)
        workers.start_missing()
        received = signal.sigtimedwait(
            {signal.SIGTERM, signal.SIGCHLD},
            beat_interval_s(settings.heartbeat_timeout_s),
        )
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        workers.reap()
        workers.kill_hung()
    workers.stop()


class _Workers:
    """Worker processes of one supervisor."""

    def __init__(
        self,
        settings: GatewaySettings,
        renderer: Renderer,
        parsers: Parsers,
        listener: socket.socket,
        own_sockets: Sequence[socket.socket],
        heartbeats: HeartbeatPage,
    ) -> None:
        self._settings = settings
        self._renderer = renderer
        self._parsers = parsers
        self._listener = listener
        self._own_sockets = own_sockets
        self._heartbeats = heartbeats
        self._urls = [
            f"http://127.0.0.1:{own.getsockname()[1]}" for own in own_sockets
        ] or [""]
        count = len(self._urls)
        self._open_sessions = memoryview(mmap.mmap(-1, 8 * count)).cast("Q")
        self._starts = [0] * count
        self._restarts = RestartLimit(_RESTARTS_PER_MINUTE * count)
        self._numbers_by_pid: dict[int, int] = {}
        self._killed: set[int] = set()
        """Workers that hung and have not been reaped yet."""
        self._numbers_by_place = {
            worker_place(number): number for number in range(count)
        }
        self._watch = SilenceWatch(
            heartbeats,
            list(self._numbers_by_place),
            timeout_s=settings.heartbeat_timeout_s,
        )

    def start_missing(self) -> None:
        """Fork every worker that does not run. Raises ServerError if they die too
        often."""
        running = set(self._numbers_by_pid.values())
        for number in range(len(self._urls)):
            if number in running:
                continue
            self._starts[number] += 1
            if self._starts[number] > 1 and not self._restarts.allows():
                raise ServerError(
                    f"worker {number} of the gateway died again and again"
                )
            self._start(number)

    def _start(self, number: int) -> None:
        self._watch.start_over(worker_place(number))
        place = WorkerPlace(
            number=number,
            urls=self._urls,
            open_sessions=self._open_sessions,
            starts=self._starts[number],
            awake_time=AwakeClock(self._heartbeats.awake_word(number)),
        )
        work = partial(
            serve,
            self._settings,
            self._renderer,
            self._parsers,
            place,
            [self._listener, *self._own_sockets[number : number + 1]],
            WorkerHeartbeats(self._heartbeats, worker_place(number)),
        )
        pid = _fork(work)
        _log.info("worker %d is process %d", number, pid)
        self._numbers_by_pid[pid] = number

    def reap(self) -> None:
        """Note the workers that have ended."""
        while self._numbers_by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = self._numbers_by_pid.pop(pid)
            if pid in self._killed:
                self._killed.remove(pid)
            else:
                self._heartbeats.count_ended(worker_place(number))
            _log.warning("worker %d ended (wait status %d)", number, status)

    def kill_hung(self) -> None:
        """Kill the workers without a heartbeat; `reap` finds them later."""
        hung = {self._numbers_by_place[place] for place in self._watch.silent()}
        for pid, number in self._numbers_by_pid.items():
            if number not in hung:
                continue
            _log.warning(
                "worker %d (process %d) showed no sign of life for %g s (run.heartbeat_timeout_s): "
                "it is killed",
                number,
                pid,
                self._settings.heartbeat_timeout_s,
            )
            self._heartbeats.count_hung(worker_place(number))
            # kill it once; the kernel reports when it is gone
            self._watch.start_over(worker_place(number))
            self._killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop all workers gracefully. Without a deadline: the parent of the supervisor
        has one."""
        for pid in self._numbers_by_pid:
            os.kill(pid, signal.SIGTERM)
        for pid in self._numbers_by_pid:
            os.waitpid(pid, 0)


def _fork(work: Callable[[], None]) -> int:
    """Run `work` in a child process that dies with this one. Returns the child's
    process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        # it may have died before the line above took effect
        parent_is_alive = os.getppid() == parent
        if parent_is_alive:
            work()
            code = 0
    except BaseException:
        _log.exception("a worker failed")
    finally:
        logging.shutdown()
        os._exit(code)
