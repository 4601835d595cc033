"""A rollout worker: user code, its sessions, and the report of how each ended. It is
the shell of a Ray actor around `runner.py`, and a plain class, so tests run it without
Ray.

Invariant: when `run` returns, every session of the assignment has been finished or
aborted at the gateway, even if `drop` has cancelled it.

The rollouts of one worker share its process. `os._exit` in one of them ends the others
too: they fail as WORKER_DIED and are replaced. More `workers.count` limit how many.
Memory is counted for the whole worker: over `workers.memory_gb` all its rollouts end as
MEMORY, and the worker asks to be replaced. Processes that rollouts start end with their
worker at the latest, even those that called setsid (`host/processes/guardian.py`)."""

import asyncio
import contextlib
import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from invrl.errors import SessionError
from invrl.host.files.temporary_folder import TemporaryFolder
from invrl.host.network.direct_connections import THIS_MACHINE, bypass_proxies
from invrl.host.output.log_lines import LogSettings, session_of_task, write_log_lines
from invrl.host.processes.environment_keys import forget_keys
from invrl.host.processes.guardian import start_guardian
from invrl.host.ray.actor_heartbeat import Pulse, pulse
from invrl.host.ray.actor_output import mark_files
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.endpoint import ConnectionPool, SessionEndpoint
from invrl.rollout.workers.held_time import longest_held, never_held
from invrl.rollout.workers.runner import Failure, Runner, UserCodeResult
from invrl.rollout.workers.session_client import SessionClient, is_refusal
from invrl.rollout.workers.worker_log import WorkerLog
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import Outcome
from invrl.types.sessions import Session
from invrl.types.tasks import Task
from invrl.user_code import plugins

_MEASURE_INTERVAL_S = 1.0
_HARD_LIMIT = 1.25
"""Multiple of the limit. Above it the process ends immediately: code that holds that
much memory probably blocks the event loop too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Arguments of a worker."""

    gateway_url: str
    model: str
    """The name that agents send."""
    rollout: RolloutConfig
    python_path: tuple[str, ...] = ()
    """The driver's sys.path, so that user code can be imported as there."""
    max_hold_s: float | None = None
    """Longest time for which the gate holds a turn; None: there is no gate."""
    process: str = "rollout-worker"
    log: LogSettings | None = None
    """Log settings; None: its loggers stay unchanged."""
    log_path: Path | None = None
    """File for the worker's output; None: Ray's own file."""
    own_temporary_folder: bool = False
    """Whether user code gets a TMPDIR that is removed with the worker. A worker is
    killed in the end, so that no `with` block of user code removes anything."""

    @property
    def request_timeout_s(self) -> float:
        """Time limit of one request of an endpoint's client."""
        return self.rollout.rollout_timeout_s + (self.max_hold_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One call of the rollout function: one session, or several for a group form."""

    task: Task
    sessions: tuple[Session, ...]

    @property
    def group_id(self) -> str:
        """Group that all its sessions belong to."""
        return self.sessions[0].group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """Outcome of each session of an assignment, in order, and the state of the
    worker."""

    outcomes: tuple[Outcome, ...]
    stuck_threads: int
    """Threads of user code that still run although their rollouts have ended."""
    over_memory: bool = False


class RolloutWorker:
    """Runs rollouts. Call `ready` first, in the event loop of `run`."""

    def __init__(self, settings: WorkerSettings) -> None:
        forget_keys()
        bypass_proxies(*THIS_MACHINE, httpx.URL(settings.gateway_url).host)
        self._settings = settings
        self._client = SessionClient(settings.gateway_url)
        self._memory_watch = _MemoryWatch(settings.rollout.workers.memory_gb or 0.0)
        self._dropped: dict[str, asyncio.Event] = {}
        """Event of each running assignment, by the id of its first session: set when it
        is dropped."""

    async def beat(self) -> Pulse:
        return pulse()

    async def ready(self) -> None:
        """Load the user's functions. Raises PluginError."""
        start_guardian()  # before TMPDIR changes: it removes the folder
        if self._settings.own_temporary_folder:
            self._temporary_folder = TemporaryFolder("rollouts")
            os.environ.update(self._temporary_folder.environment())
            tempfile.tempdir = None  # what was found in the environment before
        self._begin_log()  # before user code is imported, because the import may print
        sys.path.extend(
            path for path in self._settings.python_path if path not in sys.path
        )
        config = self._settings.rollout
        function = plugins.load_rollout_function(config.rollout_function_path or "")
        reward_function = None
        if config.reward_function_path:
            reward_function = plugins.load_reward_function(config.reward_function_path)
        self._runner = Runner(
            function, reward_function, timeout_s=config.rollout_timeout_s
        )
        # Imported now: it takes seconds on a busy machine, which would block the
        # rollouts in the loop. `openai` alone leaves most of it to the first request.
        importlib.import_module("openai.resources.chat")
        self._pool = ConnectionPool()
        self._memory_watch.start()

    def _begin_log(self) -> None:
        settings = self._settings
        if settings.log is not None:
            mark_files(settings.process, settings.log)
        file = settings.log_path
        if file is not None and not WorkerLog(file).take_output():
            file = None
        if settings.log is not None:
            write_log_lines(settings.process, settings.log, file=file)

    async def run(self, assignment: Assignment) -> WorkerReply:
        """Run the rollout function and report how each session ended. Raises
        SessionError or DeadlineError only if the gateway has stopped working: the run
        cannot continue then."""
        endpoints = [
            SessionEndpoint(
                session,
                model=self._settings.model,
                timeout_s=self._settings.request_timeout_s,
                pool=self._pool,
            )
            for session in assignment.sessions
        ]
        first_session_id = assignment.sessions[0].id
        dropped = asyncio.Event()
        self._dropped[first_session_id] = dropped
        logged_as = session_of_task.set(
            ",".join(session.id for session in assignment.sessions)
        )
        try:
            results = await self._within_memory(assignment, endpoints, dropped)
        finally:
            session_of_task.reset(logged_as)
            del self._dropped[first_session_id]
        reports = [
            self._report(session, result)
            for session, result in zip(assignment.sessions, results, strict=True)
        ]
        outcomes = await asyncio.gather(*reports)
        return WorkerReply(
            outcomes=tuple(outcomes),
            stuck_threads=self._runner.stuck_threads,
            over_memory=self._memory_watch.over_limit.is_set(),
        )

    async def drop(self, session_id: str) -> bool:
        """Cancel the assignment whose first session this is, so that `run` soon
        returns. Returns False if the assignment is not running (any more, or yet)."""
        dropped = self._dropped.get(session_id)
        if dropped is None:
            return False
        dropped.set()
        return True

    async def _within_memory(
        self,
        assignment: Assignment,
        endpoints: list[SessionEndpoint],
        dropped: asyncio.Event,
    ) -> list[UserCodeResult]:
        """Return the runner's results. If the worker exceeds its memory limit first,
        MEMORY for each session."""
        over_limit = self._memory_watch.over_limit
        held_s = never_held
        if self._settings.max_hold_s is not None:
            held_s = longest_held(self._client, assignment.sessions)
        results = asyncio.create_task(
            self._runner.run(assignment.task, endpoints, dropped, held_s)
        )
        exceeded = asyncio.create_task(over_limit.wait())
        try:
            await asyncio.wait({results, exceeded}, return_when=asyncio.FIRST_COMPLETED)
            # User code can cancel any task of the loop, so a finished `exceeded` alone
            # proves nothing.
            if results.done() or not over_limit.is_set():
                return await results
        finally:
            exceeded.cancel()
            results.cancel()
        failure = Failure(reason=FailureReason.MEMORY, detail=self._memory_watch.detail)
        return [failure] * len(endpoints)

    async def _report(self, session: Session, result: UserCodeResult) -> Outcome:
        if isinstance(result, Failure):
            return await self._client.abort(session, result.reason, result.detail)
        try:
            await self._client.attach(session, result.extra)
            return await self._client.finish(session, result.reward, result.components)
        except SessionError as refusal:
            if not is_refusal(refusal):
                raise
            # If the session has ended meanwhile, `abort` returns the outcome that it
            # ended with.
            return await self._client.abort(
                session, FailureReason.BAD_RETURN, str(refusal)
            )


class _MemoryWatch:
    """Measures the memory of the process and its children. It does so in a thread,
    because code that leaks memory may block the event loop."""

    def __init__(self, limit_gb: float) -> None:
        self.over_limit = asyncio.Event()
        self.detail = ""
        self._limit_gb = limit_gb

    def start(self) -> None:
        if self._limit_gb:
            loop = asyncio.get_running_loop()
            threading.Thread(
                target=self._measure, args=(loop,), name="memory-watch", daemon=True
            ).start()

    def _measure(self, loop: asyncio.AbstractEventLoop) -> None:
        worker = psutil.Process()
        while not loop.is_closed():
            time.sleep(_MEASURE_INTERVAL_S)
            children = worker.children(recursive=True)
            held_gb = _resident_gb([worker, *children])
            if held_gb <= self._limit_gb:
                continue
            self.detail = (
                f"the worker held {held_gb:.1f} GB, with its {len(children)} child processes; "
                f"workers.memory_gb is {self._limit_gb:g}"
            )
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self.over_limit.set)
            if held_gb > _HARD_LIMIT * self._limit_gb:
                # An event loop that still runs has time to report.
                time.sleep(_MEASURE_INTERVAL_S)
                print(f"ended on the spot: {self.detail}", file=sys.stderr, flush=True)
                os._exit(1)


def _resident_gb(processes: Sequence[psutil.Process]) -> float:
    """Return the resident memory of those processes that still exist."""
    num_bytes = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            num_bytes += process.memory_info().rss
    return num_bytes / 1e9
