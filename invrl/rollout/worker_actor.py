"""A rollout worker: user code, its sessions, and the report of how each ended. A Ray actor's shell
around `runner.py`; a plain class, so tests run it without Ray.

Invariant: every session of an assignment has been finished or aborted at the gateway when `run`
returns. Rollouts of one worker share its process: `os._exit` in one takes the others down too (they
fail as WORKER_DIED and are replaced; more `rollout_workers` spread the damage). Held by
`worker_handle.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from dataclasses import dataclass

from invrl import plugins
from invrl.rollout.endpoint import ConnectionPool, SessionEndpoint
from invrl.rollout.runner import Failure, Outcome, Runner
from invrl.rollout.session_client import SessionClient
from invrl.types import FailedRollout, FailureReason, RolloutSummary, Session, Task

_BEAT_S = 0.25
_BLOCKED_WORTH_SAYING_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is started with. `model` is the name that agents send."""

    gateway_url: str
    model: str
    rollout_function_path: str
    reward_function_path: str
    rollout_timeout_s: float
    python_path: tuple[str, ...] = ()
    """The driver's sys.path: what imports there imports here."""
    report_timeout_s: float = 60.0
    """How long a finish or abort may wait for the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One call of the rollout function: one session, or several for a group form."""

    task: Task
    sessions: tuple[Session, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReply:
    """How each session of an assignment ended, in order, and the worker's own state."""

    outcomes: tuple[RolloutSummary | FailedRollout, ...]
    stuck_threads: int


class RolloutWorker:
    """`ready` first, in the event loop that `run` is called in."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._client = SessionClient(settings.gateway_url, deadline_s=settings.report_timeout_s)
        self._watch = _LoopWatch()

    async def ready(self) -> None:
        """Loads the user's functions. Raises PluginError."""
        settings = self._settings
        sys.path.extend(path for path in settings.python_path if path not in sys.path)
        reward_path = settings.reward_function_path
        self._runner = Runner(
            plugins.load_rollout_function(settings.rollout_function_path),
            plugins.load_reward_function(reward_path) if reward_path else None,
            timeout_s=settings.rollout_timeout_s,
        )
        importlib.import_module("openai")  # seconds on a busy machine: not while rollouts share the loop
        self._pool = ConnectionPool()
        self._watch.start()

    async def run(self, assignment: Assignment) -> WorkerReply:
        """Runs the rollout function and reports. Raises SessionError or DeadlineError only where the
        gateway does not take the report: the run cannot go on then."""
        settings = self._settings
        endpoints = [
            SessionEndpoint(
                session, model=settings.model, timeout_s=settings.rollout_timeout_s, pool=self._pool
            )
            for session in assignment.sessions
        ]
        started = time.monotonic()
        outcomes = await self._runner.run(assignment.task, endpoints)
        blocked_s = self._watch.longest_since(started)
        reports = await asyncio.gather(
            *(
                self._report(session, outcome, blocked_s)
                for session, outcome in zip(assignment.sessions, outcomes, strict=True)
            )
        )
        return WorkerReply(outcomes=tuple(reports), stuck_threads=self._runner.stuck_threads)

    async def _report(
        self, session: Session, outcome: Outcome, blocked_s: float
    ) -> RolloutSummary | FailedRollout:
        if isinstance(outcome, Failure):
            detail = outcome.detail
            if outcome.reason is FailureReason.TIMEOUT and blocked_s > _BLOCKED_WORTH_SAYING_S:
                detail += (
                    f"\nA function blocked this worker's event loop for {blocked_s:.1f} s meanwhile: "
                    "async functions must await, blocking ones be plain `def`."
                )
            return await self._client.abort(session, outcome.reason, detail)
        return await self._client.finish(session, outcome.reward, outcome.components)


class _LoopWatch:
    """Measures how long the event loop does not get to run."""

    def __init__(self) -> None:
        self._blocks: list[tuple[float, float]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    def longest_since(self, start: float) -> float:
        """Seconds of the longest block that ended after `start` (time.monotonic)."""
        return max((seconds for ended, seconds in self._blocks if ended > start), default=0.0)

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT_S)
            late = time.monotonic() - before - _BEAT_S
            if late > _BLOCKED_WORTH_SAYING_S:
                self._blocks = [*self._blocks[-63:], (time.monotonic(), late)]
