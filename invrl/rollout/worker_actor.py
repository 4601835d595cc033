"""A rollout worker: user code, its sessions, and the report of how each ended. A Ray actor's shell around
`runner.py`; a plain class, so tests run it without Ray.

Invariant: every session of an assignment has been finished or aborted at the gateway when `run` returns,
also when `drop` has cancelled it.
Rollouts of one worker share its process: `os._exit` in one takes the others down too (they fail as
WORKER_DIED and are replaced; more `rollout_workers` spread the damage), and memory that one holds counts for
all (over `rollout_worker_memory_gb` they end as MEMORY, and the worker asks to be replaced). Processes that
rollouts start live until their worker ends at the latest, also those in a session of their own
(`host/guardian.py`)."""

import asyncio
import contextlib
import importlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from invrl import plugins
from invrl.errors import SessionError
from invrl.host.actor_heartbeat import Pulse, pulse
from invrl.host.environment_keys import forget_keys
from invrl.host.guardian import start_guardian
from invrl.rollout.config import RolloutConfig
from invrl.rollout.endpoint import ConnectionPool, SessionEndpoint
from invrl.rollout.runner import Failure, Runner, UserCodeResult
from invrl.rollout.session_client import SessionClient, is_refusal
from invrl.rollout.worker_log import WorkerLog
from invrl.types import FailureReason, Outcome, Session, Task

_MEASURE_INTERVAL_S = 1.0
_HARD_LIMIT = 1.25
"""A multiple of the limit, at which the process ends at once: code that holds so much memory probably blocks
the event loop too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is started with. `model` is the name that agents send."""

    gateway_url: str
    model: str
    rollout: RolloutConfig
    python_path: tuple[str, ...] = ()
    """The driver's sys.path: what imports there imports here."""
    log_path: Path | None = None
    """Where what the worker prints goes; None: where Ray puts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One call of the rollout function: one session, or several for a group form."""

    task: Task
    sessions: tuple[Session, ...]

    @property
    def group_id(self) -> str:
        """Of all its sessions."""
        return self.sessions[0].group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """How each session of an assignment ended, in order, and the worker's own state."""

    outcomes: tuple[Outcome, ...]
    stuck_threads: int
    over_memory: bool = False


class RolloutWorker:
    """`ready` first, in the event loop that `run` is called in."""

    def __init__(self, settings: WorkerSettings) -> None:
        forget_keys()
        self._settings = settings
        self._client = SessionClient(settings.gateway_url)
        self._memory_watch = _MemoryWatch(settings.rollout.rollout_worker_memory_gb)
        self._dropped: dict[str, asyncio.Event] = {}
        """Of each assignment that runs, by the id of its first session."""

    async def beat(self) -> Pulse:
        return pulse()

    async def ready(self) -> None:
        """Loads the user's functions. Raises PluginError."""
        start_guardian()
        if self._settings.log_path is not None:  # before user code is imported, which may print
            WorkerLog(self._settings.log_path).take_output()
        sys.path.extend(path for path in self._settings.python_path if path not in sys.path)
        config = self._settings.rollout
        function = plugins.load_rollout_function(config.rollout_function_path)
        reward_function = None
        if config.reward_function_path:
            reward_function = plugins.load_reward_function(config.reward_function_path)
        self._runner = Runner(function, reward_function, timeout_s=config.rollout_timeout_s)
        importlib.import_module("openai")  # seconds on a busy machine: not while rollouts share the loop
        self._pool = ConnectionPool()
        self._memory_watch.start()

    async def run(self, assignment: Assignment) -> WorkerReply:
        """Runs the rollout function and reports. Raises SessionError or DeadlineError only where the
        gateway does not work any more: the run cannot go on then."""
        endpoints = [
            SessionEndpoint(
                session,
                model=self._settings.model,
                timeout_s=self._settings.rollout.rollout_timeout_s,
                pool=self._pool,
            )
            for session in assignment.sessions
        ]
        first_session_id = assignment.sessions[0].id
        dropped = asyncio.Event()
        self._dropped[first_session_id] = dropped
        try:
            results = await self._within_memory(assignment.task, endpoints, dropped)
        finally:
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
        """Cancels the assignment whose first session this is; `run` then answers soon. False if it does not
        run, or not yet."""
        dropped = self._dropped.get(session_id)
        if dropped is not None:
            dropped.set()
        return dropped is not None

    async def _within_memory(
        self, task: Task, endpoints: list[SessionEndpoint], dropped: asyncio.Event
    ) -> list[UserCodeResult]:
        """The runner's outcomes, or MEMORY for each where the worker holds too much before they come."""
        running = asyncio.create_task(self._runner.run(task, endpoints, dropped))
        over = asyncio.create_task(self._memory_watch.over_limit.wait())
        try:
            await asyncio.wait({running, over}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() or not self._memory_watch.over_limit.is_set():  # user code may cancel any task
                return await running
        finally:
            over.cancel()
            running.cancel()
        failure = Failure(reason=FailureReason.MEMORY, detail=self._memory_watch.detail)
        return [failure] * len(endpoints)

    async def _report(self, session: Session, result: UserCodeResult) -> Outcome:
        if isinstance(result, Failure):
            return await self._client.abort(session, result.reason, result.detail)
        try:
            return await self._client.finish(session, result.reward, result.components)
        except SessionError as refusal:
            if not is_refusal(refusal):
                raise
            # A session that has ended meanwhile answers with its own outcome.
            return await self._client.abort(session, FailureReason.BAD_RETURN, str(refusal))


class _MemoryWatch:
    """Measures the memory of the process and its children in a thread, because code that leaks memory may
    block the event loop."""

    def __init__(self, limit_gb: float) -> None:
        self.over_limit = asyncio.Event()
        self.detail = ""
        self._limit_gb = limit_gb

    def start(self) -> None:
        if self._limit_gb:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._measure, args=(loop,), name="memory-watch", daemon=True).start()

    def _measure(self, loop: asyncio.AbstractEventLoop) -> None:
        me = psutil.Process()
        while not loop.is_closed():
            time.sleep(_MEASURE_INTERVAL_S)
            family = [me, *me.children(recursive=True)]
            held = 0
            for process in family:
                with contextlib.suppress(psutil.Error):
                    held += process.memory_info().rss
            if held > self._limit_gb * 1e9:
                self.detail = (
                    f"the worker held {held / 1e9:.1f} GB, with its {len(family) - 1} child processes; "
                    f"rollout_worker_memory_gb is {self._limit_gb:g}"
                )
                with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                    loop.call_soon_threadsafe(self.over_limit.set)
            if held > _HARD_LIMIT * self._limit_gb * 1e9:
                time.sleep(_MEASURE_INTERVAL_S)  # enough for an event loop that runs, to report
                print(f"ended on the spot: {self.detail}", file=sys.stderr, flush=True)
                os._exit(1)
