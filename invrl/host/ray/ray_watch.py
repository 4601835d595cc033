"""Watches the raylet and the GCS of a Ray that we started, and ends this process with
the cause when one is gone.

Without either of them a run can neither continue nor end in order: a raylet takes the
driver with it within a second, a lost GCS aborts it from C++ after a minute, and
`ray.shutdown` with a stopped GCS took seven minutes. So when one is gone or does not
answer, this process reports the cause and ends immediately; the supervisor (or the
guardian) ends what is left below it.

Only for a Ray that we started: that of RAY_ADDRESS is not ours to end.
"""

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from invrl.host.processes import lifeline
from invrl.host.processes.awake_time import Stopwatch
from invrl.host.processes.lifeline import NoteKind

logger = logging.getLogger(__name__)
_FAILURE_EXIT = 1
_LOOK_INTERVAL_S = 1.0
_WATCHED = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One of Ray's processes. `ask` returns once it has answered, and raises or hangs
    if it does not."""

    name: str
    pid: int
    ask: Callable[[], object]


class RayWatch:
    """Calls `end` with the cause, once, when a process has ended or has not answered
    for a timeout."""

    def __init__(
        self,
        processes: list[Watched],
        *,
        heartbeat_timeout_s: float,
        end: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._timeout_s = heartbeat_timeout_s
        self._end = end
        self._stopped = threading.Event()
        self._report_lock = threading.Lock()

    def start(self) -> None:
        for process in self._processes:
            for work in (self._wait_for_end, self._ask):
                threading.Thread(
                    target=work,
                    args=(process,),
                    name=f"watch {process.name}",
                    daemon=True,
                ).start()

    def stop(self) -> None:
        """Report nothing from now on: processes that end now were meant to."""
        self._stopped.set()

    def _wait_for_end(self, process: Watched) -> None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return self._report(f"{process.name} (process {process.pid}) has ended")
        except OSError as error:
            # a kernel before 5.3: its silence is still noticed
            logger.warning("no pidfd of %s: %s", process.name, error)
            return None
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while not self._stopped.is_set():
                if poll.poll(1000 * _LOOK_INTERVAL_S):
                    how = _describe_end(descriptor)
                    return self._report(f"{process.name} (process {process.pid}) {how}")
        finally:
            os.close(descriptor)

    def _ask(self, process: Watched) -> None:
        """Poll repeatedly, in a separate thread, because a call to a stopped process
        may hang."""
        while not self._stopped.is_set():
            answered = threading.Event()
            asker = threading.Thread(
                target=_answer, args=(process.ask, answered), daemon=True
            )
            asker.start()
            silent_s = 0.0
            stopwatch = Stopwatch(longest_gap_s=2 * _LOOK_INTERVAL_S)
            while not answered.wait(_LOOK_INTERVAL_S):
                silent_s += stopwatch.lap_s()
                if self._stopped.is_set():
                    return
                if silent_s > self._timeout_s:
                    return self._report(
                        f"{process.name} (process {process.pid}) has not answered for {silent_s:.0f} s "
                        "(run.heartbeat_timeout_s), so it counts as dead"
                    )
            self._stopped.wait(self._timeout_s / 10)

    def _report(self, what: str) -> None:
        with self._report_lock:
            if not self._stopped.is_set():
                self._stopped.set()
                self._end(f"{what}; a run cannot go on without it")


def _answer(ask: Callable[[], object], answered: threading.Event) -> None:
    """Ask until there is an answer; a refused call does not count as an answer."""
    while True:
        try:
            ask()
        except Exception:
            time.sleep(_LOOK_INTERVAL_S)
        else:
            answered.set()
            return


def _describe_end(descriptor: int) -> str:
    """Describe how the process ended, without reaping it: Ray does that."""
    with contextlib.suppress(OSError):
        info = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if info is not None and info.si_code != os.CLD_EXITED:
            return f"was killed by {signal.Signals(info.si_status).name}"
        if info is not None:
            return f"ended with exit code {info.si_status}"
    return "has ended"


def end_this_process(cause: str) -> None:
    """Report the cause to the user, the log and the supervisor, and end without
    clean-up."""
    lifeline.tell(NoteKind.CAUSE, cause)
    with contextlib.suppress(OSError):
        logger.error("%s", cause)
        if not lifeline.is_held():
            print(f"invrl: the run failed: {cause}", file=sys.stderr, flush=True)
    os._exit(_FAILURE_EXIT)


def raylet_question(node: Any, *, timeout_s: float) -> Callable[[], object]:
    """Return a call that the raylet of `node` answers by itself.

    Not the call for its statistics, for which it asks every worker: a stopped worker
    would look like a silent raylet.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    address = f"{node.node_ip_address}:{node.node_manager_port}"
    # no proxy, as in Ray's own calls
    channel = init_grpc_channel(address, options=GLOBAL_GRPC_OPTIONS)
    stub: Any = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
    messages: Any = node_manager_pb2  # its classes exist only once it is imported
    return lambda: stub.GetSystemConfig(
        messages.GetSystemConfigRequest(), timeout=timeout_s
    )


@contextlib.contextmanager
def watched_ray(
    node: Any, client: Any, *, heartbeat_timeout_s: float
) -> Iterator[None]:
    """Watch a Ray that this process started within the block. `node` is Ray's own;
    `client` is for its GCS."""
    wait_s = max(1.0, heartbeat_timeout_s / 3)
    ask: Mapping[str, Callable[[], object]] = {
        "gcs_server": lambda: client.internal_kv_get(
            b"invrl", namespace=None, timeout=wait_s
        ),
        "raylet": raylet_question(node, timeout_s=wait_s),
    }
    processes = [
        Watched(name=name, pid=info.process.pid, ask=ask[kind])
        for kind, name in _WATCHED.items()
        for info in node.all_processes.get(kind, ())
    ]
    watch = RayWatch(
        processes, heartbeat_timeout_s=heartbeat_timeout_s, end=end_this_process
    )
    watch.start()
    try:
        yield
    finally:
        watch.stop()
