"""A rollout's deadline, which does not count the time for which the gateway's gate holds
its turns.

Only the gateway knows that time. It is asked when the deadline has passed, and the wait
continues for as long as turns have been held.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from invrl.errors import DeadlineError, SessionError
from invrl.host.processes.awake_time import awake_wait
from invrl.rollout.workers.session_client import SessionClient
from invrl.types.sessions import Session

_REPLY_S = 10.0

FutureT = TypeVar("FutureT", bound=asyncio.Future[Any])
HeldTime = Callable[[], Awaitable[float]]
"""Returns the seconds for which the turns of a rollout have been held so far."""


async def never_held() -> float:
    """Return 0: there is no gate."""
    return 0.0


def longest_held(client: SessionClient, sessions: Collection[Session]) -> HeldTime:
    """Return what asks the gateway for the time of the session that was held longest. A
    gateway that does not tell counts as one that held nothing."""

    async def held_s() -> float:
        requests = [client.held_s(session, deadline_s=_REPLY_S) for session in sessions]
        try:
            return max(await asyncio.gather(*requests))
        except (SessionError, DeadlineError):
            return 0.0

    return held_s


async def wait_unheld(
    futures: Collection[FutureT], timeout_s: float, held_s: HeldTime
) -> float:
    """Wait until one of the futures is done, or until this process was awake for
    `timeout_s` in which no turn was held. Returns the held seconds that it knows of: 0
    if it did not have to ask."""
    known_s = 0.0
    while True:
        done, _ = await awake_wait(
            futures, timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return known_s
        held_until_now_s = await held_s()
        timeout_s = held_until_now_s - known_s
        if timeout_s <= 0.0:
            return known_s
        known_s = held_until_now_s
