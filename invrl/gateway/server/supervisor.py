"""The gateway's supervisor: loads what is slow to load once, forks the workers, and forks again what dies or
hangs.

Invariants: it has no thread and no event loop, so that a fork is whole; a worker dies with it, and it with
whoever started it (PR_SET_PDEATHSIG). The sockets are its parent's: while nobody accepts, connections wait in
the kernel. SIGTERM ends all in good order; Ctrl-C is the parent's to pass on."""

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
from invrl.gateway.rendering.chat_template import chat_template_source
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.parsers import choose_parsers
from invrl.gateway.server.gateway_worker import serve
from invrl.gateway.server.heartbeat_page import (
    SUPERVISOR,
    HeartbeatPage,
    SilenceWatch,
    beat_interval_s,
    worker_place,
)
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.descendants import die_with_parent
from invrl.host.process import RestartLimit
from invrl.store.schema import connect

_log = logging.getLogger(__name__)
_RESTARTS_PER_MINUTE = 10


def supervise(
    settings: GatewaySettings,
    listener: socket.socket,
    own: Sequence[socket.socket],
    heartbeats: HeartbeatPage,
) -> None:
    """Returns after SIGTERM, with all workers gone. ServerError when a worker cannot live. `own`: a loopback
    socket for each worker, if there are several."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})
    signals = {signal.SIGTERM, signal.SIGCHLD}
    timeout_s = settings.heartbeat_timeout_s
    path, template = settings.model_path, settings.chat_template_path
    keep = settings.keep_thinking
    renderer = load_renderer(path, settings.vocab_size, chat_template=template, keep_thinking=keep)
    names = settings.tool_call_parser, settings.reasoning_parser
    parsers = choose_parsers(*names, template=chat_template_source(path, template))
    parsers.preload()
    connect(Path(settings.store_path)).close()  # the file exists before workers come to it at once
    urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in own] or [""]
    shared = memoryview(mmap.mmap(-1, 8 * len(urls))).cast("Q")
    running: dict[int, int] = {}
    starts, limit = [0] * len(urls), RestartLimit(_RESTARTS_PER_MINUTE * len(urls))
    gc.freeze()  # what is shared stays shared
    places = {worker_place(number): number for number in range(len(urls))}
    watch = SilenceWatch(heartbeats, list(places), timeout_s=timeout_s)
    while True:
        heartbeats.beat(SUPERVISOR)
        for number in set(range(len(urls))) - set(running.values()):
            starts[number] += 1
            if starts[number] > 1 and not limit.allows():
                raise ServerError(f"worker {number} of the gateway died again and again")
            place = WorkerPlace(number=number, urls=urls, open_sessions=shared, starts=starts[number])
            sockets = [listener, *own[number : number + 1]]
            beat = partial(heartbeats.beat, worker_place(number))
            watch.start_over(worker_place(number))
            work = partial(
                serve,
                settings,
                renderer,
                parsers,
                place,
                sockets,
                beat=beat,
                run_ended=heartbeats.run_has_ended,
            )
            running[_fork(work)] = number
        received = signal.sigtimedwait(signals, beat_interval_s(timeout_s))
        if received is not None and received.si_signo == signal.SIGTERM:
            break
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _log.warning("worker %d ended (wait status %d)", running.pop(ended[0]), ended[1])
            if not running:
                break
        hung = {places[place] for place in watch.silent()}
        for pid, number in running.items():
            if number in hung:
                _log.warning(
                    "worker %d (process %d) showed no sign of life for %g s (run.heartbeat_timeout_s): "
                    "it is killed",
                    number,
                    pid,
                    timeout_s,
                )
                heartbeats.count_hung(worker_place(number))
                watch.start_over(worker_place(number))  # killed once; the kernel says when it is gone
                os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    for pid in running:  # who waits for us has the deadline
        os.waitpid(pid, 0)


def _fork(work: Callable[[], None]) -> int:
    """`work` in a child that dies with this process."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        if os.getppid() == parent:  # otherwise it died before we asked to die with it
            work()
            code = 0
    except BaseException:
        _log.exception("a worker failed")
    finally:
        logging.shutdown()
        os._exit(code)
