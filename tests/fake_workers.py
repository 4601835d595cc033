"""Rollout workers that do what their assignments say, and a pool of them."""

from __future__ import annotations

import asyncio

from invrl.errors import ActorDiedError, ActorSilentError
from invrl.rollout.workers.worker_actor import Assignment, WorkerReply
from invrl.rollout.workers.worker_pool import WorkerPool
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task


def session(name):
    return Session(
        id=name,
        key=f"key-{name}",
        base_url="http://gw/s/k/v1",
        task_id=name,
        group_id="g",
        index=0,
        attempt=0,
        purpose="train",
        sampling=Sampling(),
    )


def failed(session, reason, detail):
    return FailedRollout(
        session_id=session.id,
        task_id=session.task_id,
        group_id=session.group_id,
        index=session.index,
        attempt=session.attempt,
        reason=reason,
        detail=detail,
    )


def assignment(name, sessions=1):
    return Assignment(
        task=Task(id=name, payload={}),
        sessions=tuple(session(f"{name}{i}") for i in range(sessions)),
    )


class FakeWorker:
    """Tasks are named by what happens: ok, die (the process), stuck, thread (one is
    left), full (memory), hold, bug."""

    def __init__(self, name):
        self.name = name
        self.given = []
        self.dead = asyncio.Event()
        self.release = asyncio.Event()
        self.threads = 0

    async def ready(self, deadline_s):
        return None

    async def run(self, assignment):
        self.given.append(assignment.task.id)
        does = assignment.task.id.split("-")[0]
        if does == "die":
            self.dead.set()
        if does == "bug":
            raise ZeroDivisionError("a bug of ours")
        if does == "thread":
            self.threads += 1
        if does in ("hold", "stuck"):
            waits = [
                asyncio.create_task(self.dead.wait()),
                asyncio.create_task(self.release.wait()),
            ]
            done, _ = await asyncio.wait(
                waits,
                timeout=0.05 if does == "stuck" else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for wait in waits:
                wait.cancel()
            if not done:
                raise ActorSilentError("the worker to answer", 0.05)
        if self.dead.is_set():
            raise ActorDiedError(f"{self.name}: exit code 1")
        outcomes = tuple(
            failed(s, FailureReason.EXCEPTION, "done") for s in assignment.sessions
        )
        return WorkerReply(
            outcomes=outcomes, stuck_threads=self.threads, over_memory=does == "full"
        )

    def kill(self):
        self.dead.set()


class Aborts:
    def __init__(self):
        self.seen = {}

    async def abort(self, session, reason, detail):
        self.seen[session.id] = (reason, detail)
        return failed(session, reason, detail)


async def started_pool(size=1, make=FakeWorker, **settings):
    workers = []
    aborts = Aborts()

    def make_worker(name):
        workers.append(make(name))
        return workers[-1]

    settings = {"run_timeout_s": 1.0, **settings}
    pool = WorkerPool(make_worker, aborts, size=size, **settings)
    await pool.start()
    return pool, workers, aborts


async def given(worker, *tasks):
    async with asyncio.timeout(60):
        while worker.given != list(tasks):
            await asyncio.sleep(0.001)


def reasons(outcomes):
    return [outcome.reason for outcome in outcomes]
