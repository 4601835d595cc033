"""The Ray session of a run: starts a local Ray, or connects to the one that
`RAY_ADDRESS` names, and shuts it down with a deadline.

A local Ray is watched (`host/ray/ray_watch.py`): when its raylet or GCS dies, the
driver ends with the cause."""

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray

from invrl.errors import ConfigError, ServerError
from invrl.host.output.wait_lines import overload
from invrl.host.processes import lifeline
from invrl.host.processes.environment_keys import RAY_TOKEN, key_in_environment
from invrl.host.ray.ray_setup import ray_folder, worker_environment
from invrl.host.ray.ray_watch import end_this_process, watched_ray
from invrl.run.settings.config import Config

_MAX_STARTS = 4
_SHUTDOWN_DEADLINE_S = 60.0
_RAYLET_DEADLINE_S = 600.0
"""Seconds for a living raylet to appear at its GCS. On a busy machine that took more
than a minute."""
_RAYLET_POLL_S = 0.2
_NOT_WORTH_A_RETRY = (ValueError, TypeError, ImportError, PermissionError)
"""Errors of `ray.init` that a retry would meet again."""
logger = logging.getLogger(__name__)


@contextmanager
def start_ray(config: Config, logs: Path) -> Iterator[None]:
    """Start a local Ray behind a token (`host/ray/ray_setup.py`), or connect to the Ray
    at `RAY_ADDRESS`. No other Ray is searched for: an address that an earlier program
    left in a file is ignored. A local Ray that does not come up is started again, four
    times in all, or for ten minutes while the machine is overloaded. Raises
    ServerError, and ConfigError for a client of a Ray of several nodes; no process of
    Ray is left then.

    The command line's SIGTERM handler stays in place. Ray's C++ code replaces it, and
    Ray's own Python handler would end the process from within our event loop.
    """
    ray_address = os.environ.get("RAY_ADDRESS")
    restore_sigterm = partial(
        signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM)
    )
    ray_private: Any = vars(ray)["_private"]
    ray_private.utils.set_sigterm_handler = lambda _: None
    _leave_unused_processes_out(ray_private.node.Node)
    # a signal to our process group must not reach Ray's
    os.register_at_fork(after_in_child=os.setpgrp)
    with ExitStack() as stack:
        try:
            if ray_address:
                _init_ray(runtime_env={"env_vars": worker_environment()})
                stack.callback(_shut_ray_down)
                refuse_remote_driver(ray_address, ray.nodes())
            else:
                # Processes of a local Ray inherit the environment. Setting it with
                # Ray's runtime_env agent takes seconds.
                stack.enter_context(_local_ray(logs))
        finally:
            restore_sigterm()
        if not ray_address:
            stack.callback(_shut_ray_down)
        node = ray_private.worker._global_node
        if node is not None:  # None for a client's address, ray://...
            _restore_sigterm_before_kill(node, restore_sigterm)
        if not ray_address:
            gcs_client = ray_private.worker.global_worker.gcs_client
            heartbeat_timeout_s = config.run.heartbeat_timeout_s
            stack.enter_context(
                watched_ray(node, gcs_client, heartbeat_timeout_s=heartbeat_timeout_s)
            )
        yield


def _leave_unused_processes_out(node: Any) -> None:
    """Start a local Ray without its autoscaler's monitor, its log monitor and its
    dashboard, which has a process even if it is not included. They took 2 of a start's
    32 CPU-seconds, and the monitor serves its metrics on all interfaces. `node`: Ray's
    class."""
    node.start_monitor = lambda self: None
    node.start_log_monitor = lambda self: None
    node.start_api_server = lambda self, **options: None


def _restore_sigterm_before_kill(node: Any, restore_sigterm: partial[Any]) -> None:
    """Restore the command line's SIGTERM handler before Ray's processes are ended,
    which takes seconds."""
    kill_all_processes = node.kill_all_processes

    def restore_and_kill(**options: Any) -> None:
        restore_sigterm()
        kill_all_processes(**options)

    node.kill_all_processes = restore_and_kill


@contextmanager
def _local_ray(logs: Path) -> Iterator[None]:
    """Start a local Ray in its own temporary folder. A failed start is repeated in
    another folder, on an overloaded machine also after `_MAX_STARTS`: the raylet ends
    itself if its agent, which imports for seconds, is not there after 15 s."""
    give_up_at = time.monotonic() + _RAYLET_DEADLINE_S
    for attempt in itertools.count(1):
        with ExitStack() as stack:
            folder = stack.enter_context(ray_folder(logs))
            try:
                with _raylet_timeout(_RAYLET_DEADLINE_S):
                    _init_ray(address="local", _temp_dir=folder)
            except ServerError as error:
                _kill_descendants_naming(folder)
                is_busy = overload() and time.monotonic() < give_up_at
                if isinstance(error.__cause__, _NOT_WORTH_A_RETRY) or (
                    attempt >= _MAX_STARTS and not is_busy
                ):
                    raise
                logger.warning("%s", error, exc_info=True)
                print(
                    f"warning: {error}; it is started again (start {attempt + 1})",
                    flush=True,
                )
                continue
            yield
            return


@contextmanager
def _raylet_timeout(deadline_s: float) -> Iterator[None]:
    """Make Ray wait for its raylet as long as that lives, at most `deadline_s`, within
    the block. Ray itself gives up after 30 s, whatever its settings, and another start
    is more work for a busy machine."""
    services = vars(ray)["_private"].services
    get_node = services.get_node

    def get_node_in_time(gcs_address: str, node_id: str) -> Any:
        give_up_at = time.monotonic() + deadline_s
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > give_up_at or not _raylet_is_alive():
                    raise
            time.sleep(_RAYLET_POLL_S)

    services.get_node = get_node_in_time
    try:
        yield
    finally:
        services.get_node = get_node


def _raylet_is_alive() -> bool:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def refuse_remote_driver(ray_address: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for a driver that is a client of a cluster of several nodes: it
    is on none of them, and its run folder, engines and gateway may be on none."""
    num_nodes = sum(bool(node["Alive"]) for node in nodes)
    if num_nodes > 1 and ray_address.startswith("ray://"):
        reason = f"this Ray has {num_nodes} nodes, and a client is on none of them"
        fix = (
            "start the run on one of its nodes, with the address of its GCS: HOST:6379"
        )
        raise ConfigError("RAY_ADDRESS", ray_address, reason, fix)


def _init_ray(**options: Any) -> None:
    """Call `ray.init`. Raises ServerError, whose cause is Ray's error."""
    try:
        # Ray reads its token once, so the token need not stay in the environment.
        with lifeline.blocked("the start of Ray"), key_in_environment(RAY_TOKEN):
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **options,
            )
    except Exception as error:
        which = "one of our own"
        ray_address = os.environ.get("RAY_ADDRESS")
        if ray_address:
            which = f"the one at RAY_ADDRESS={ray_address}"
        failure = f"Ray ({which}) did not start: {_first_line(error)}{overload()}"
        # a part of it may have started
        _shut_ray_down(earlier_failure=f"{failure}; and ")
        raise ServerError(failure) from error


def _first_line(error: Exception) -> str:
    """Return Ray's message without the logs that it may append."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].rstrip(".")


def _kill_descendants_naming(folder: str) -> None:
    """Kill the processes of a failed start, which Ray itself forgets. Each has Ray's
    temporary folder on its command line."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(folder in argument for argument in process.cmdline()):
                process.kill()


def _shut_ray_down(earlier_failure: str = "") -> None:
    """Call `ray.shutdown`, which waits for minutes if a process of Ray does not answer.
    After the deadline this process ends with a message that begins with
    `earlier_failure`."""
    message = f"{earlier_failure}Ray did not end within {_SHUTDOWN_DEADLINE_S:g} s"
    timer = threading.Timer(_SHUTDOWN_DEADLINE_S, end_this_process, [message])
    timer.daemon = True
    timer.start()
    ray.shutdown()
    timer.cancel()
