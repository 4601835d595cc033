"""Calls of all trainer ranks together.

Invariant: the calls end on all ranks within their deadline (a failure up to 10 s
later), or all ranks are killed. The ranks meet in collectives, so if one of them fails
or dies the others would wait for it.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from invrl.errors import (
    ActorDiedError,
    DeadlineError,
    DiskFullError,
    InvrlError,
    ServerError,
    TrainError,
)
from invrl.host.files.disk import is_full
from invrl.host.processes.awake_time import awake_wait
from invrl.host.ray.actor import ActorHandle
from invrl.host.ray.actor_heartbeat import Pulse
from invrl.host.ray.actor_log import last_lines
from invrl.host.ray.ray_memory import killed_for_memory

Answer = TypeVar("Answer")

_DEATH_S = 10.0
"""Time that Ray may take to report a death. Ranks whose collective broke because of it
report earlier."""


class RankCalls:
    """Calls of all ranks; `actors` has them by number."""

    def __init__(
        self, actors: Sequence[ActorHandle[Any]], *, heartbeat_timeout_s: float
    ) -> None:
        self.actors = actors
        self.processes: Mapping[int, Pulse] = {}
        self._heartbeat_timeout_s = heartbeat_timeout_s

    async def watch(self) -> None:
        """Watch all ranks after their start. Never returns; raises ServerError that
        names a rank which does not answer, with the last lines of its log."""
        watches = [
            asyncio.create_task(self._watch_rank(number))
            for number in range(len(self.actors))
        ]
        try:
            await asyncio.gather(*watches)
        finally:
            for watch in watches:
                watch.cancel()

    async def _watch_rank(self, number: int) -> None:
        try:
            await self.actors[number].watch(self._heartbeat_timeout_s)
        except ServerError as error:
            raise ServerError(
                f"{error}{last_lines(self.processes.get(number))}"
            ) from error

    async def wait(
        self,
        method: str,
        calls: Mapping[int, Coroutine[Any, Any, Answer]],
        timeout_s: float,
    ) -> dict[int, Answer]:
        """Return the results of all calls, by number. If one fails, or not all end in
        time, kill all ranks and raise the cause. The exception is a full disk: if every
        call ends nevertheless, raise DiskFullError and keep the ranks."""
        tasks = {rank: asyncio.create_task(call) for rank, call in calls.items()}
        try:
            done, pending = await awake_wait(
                tasks.values(), timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            if pending and any(_may_follow(task.exception()) for task in done):
                await _wait_for_death(pending)
            failures = {
                rank: task.exception()
                for rank, task in tasks.items()
                if task.done() and task.exception() is not None
            }
            unfinished = [task for task in tasks.values() if not task.done()]
            if failures and not unfinished and all(map(_is_full, failures.values())):
                number = min(failures)
                reason = f"{self.actors[number].name} found no space in {method}"
                raise DiskFullError(f"{reason}: {failures[number]}") from failures[
                    number
                ]
            if failures or unfinished:
                self.stop()
            if failures:
                number = _first_cause(failures)
                log = last_lines(self.processes.get(number))
                name = self.actors[number].name
                raise _train_error(failures[number], name, method, log) from failures[
                    number
                ]
            if unfinished:
                raise DeadlineError(
                    f"{len(unfinished)} of {len(calls)} trainer ranks to finish {method}",
                    timeout_s,
                )
            return {rank: task.result() for rank, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()

    def stop(self) -> None:
        for actor in self.actors:
            actor.kill()


def call_deadline(timeout_s: float) -> float:
    """Return the deadline of one rank's call: later than that of `wait`, which says how
    many ranks are late."""
    return timeout_s + 2 * _DEATH_S


async def _wait_for_death(pending: set["asyncio.Task[Answer]"]) -> None:
    """Wait until one of these calls reports that its rank has died, or all have ended,
    for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DEATH_S):
            while pending:
                done, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED
                )
                if any(isinstance(task.exception(), ActorDiedError) for task in done):
                    return


def _is_full(error: BaseException | None) -> bool:
    return error is not None and is_full(error)


def _may_follow(error: BaseException | None) -> bool:
    """Whether the error may only be a consequence of another rank's failure, or other
    ranks may be about to report the same full disk."""
    if isinstance(error, DiskFullError):
        return True
    return error is not None and not isinstance(error, InvrlError)


def _first_cause(failures: dict[int, BaseException | None]) -> int:
    """Return the rank whose failure caused those of the others: one that died, else the
    first."""
    for rank, error in failures.items():
        if isinstance(error, ActorDiedError):
            return rank
    return min(failures)


def _train_error(
    error: BaseException | None, name: str, method: str, log: str
) -> Exception:
    """Return the rank's own error if it is an InvrlError, else a TrainError that
    describes it. `name` is the rank's; `log` is the last output of its process."""
    if isinstance(error, ActorDiedError):
        killed = killed_for_memory(error.__cause__, name)
        if killed:
            return TrainError(killed)
    elif isinstance(error, InvrlError):
        return error
    return TrainError(
        f"{name} failed in {method}: {type(error).__name__}: {error}{log}"
    )
