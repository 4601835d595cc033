"""When an engine or the router counts as dead.

Not to be confused with the heartbeats of Ray actors (`host/ray/actor_heartbeat.py`) and
of the gateway's processes (`gateway/server/processes/heartbeat_page.py`): servers that
are not our code are asked over HTTP.

Invariant: a process that answers is not dead, however busy it is. It is dead once its
process has ended, or once it has left `QUESTIONS` questions in a row unanswered, each
waited for an equal part of the time that the run gives a silent process
(`run.heartbeat_timeout_s`). A question also fails while one of the server's processes
is stopped.

An engine's scheduler answers `/server_info` between two steps, also while its
generation is paused, so an engine is asked during a weight update too. The exception is
one call of an update in which the engine copies or hashes all its weights: the
scheduler answers nothing until that is done, and a large model takes longer than
`run.heartbeat_timeout_s`. Silence during such a call proves nothing; the call has a
deadline of its own (`weights.timeout_s`), after which the update drops
the engine. A process that has ended, or is stopped, is noticed all the same.

An engine that answers but makes no token while it may generate counts as dead after
`TOKEN_TIMEOUTS` times as long: a long prompt on a busy machine may take a while, and
any step that ends is an answer.

An engine whose answers cannot be true is as bad as a dead one (`wrong_reply`). The
router does not say which engine a wrong answer came from, so all of them are examined
then.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.errors import InvrlError, WrongReplyError
from invrl.host.processes.process import ENDED, STOPPED, process_state
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion

_LOG = logging.getLogger(__name__)

QUESTIONS = 3
"""Failed polls in a row that count as death. One alone proves nothing: our own event
loop may have been blocked."""
TOKEN_TIMEOUTS = 3
_EXAMINED_TOKENS = 16
"""Tokens of the request by which an engine is examined after a wrong answer."""
_MAX_POLL_INTERVAL_S = 0.25
"""Longest time until an ended process is noticed: less than the gateway waits before it
tries the router again."""

Ask = Callable[[float], Awaitable[bool]]
"""Takes a deadline in seconds. Returns whether the server answered within it."""


class Answers(Protocol):
    """Part of `SglangClient` that is polled."""

    async def answers(self, *, deadline_s: float) -> bool: ...
    async def generates(self, *, deadline_s: float) -> bool: ...


class Generates(Protocol):
    """Part of `SglangClient` that samples."""

    def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]: ...


class Updated(Protocol):
    """Part of a weight receiver that tells the state of its engine."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine makes no token."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether the engine answers nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time as the health check sees it; tests replace it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def until_silent(
    ask: Ask, *, timeout_s: float, interval_s: float, clock: Clock
) -> None:
    """Ask every `interval_s`; return once answers have been missing for `timeout_s`.

    A poll that fails early still takes its share of the time.
    """
    question_s = timeout_s / QUESTIONS
    unanswered = 0
    await clock.sleep(interval_s)
    while unanswered < QUESTIONS:
        asked_at = clock.now()
        answered = False
        try:
            answered = await ask(question_s)
        except Exception:  # of one question: the next one may succeed
            _LOG.exception("a health question failed")
        if answered:
            unanswered = 0
            await clock.sleep(interval_s)
        else:
            unanswered += 1
            await clock.sleep(max(0.0, asked_at + question_s - clock.now()))


async def until_ended(
    processes: Sequence[psutil.Process], *, interval_s: float, clock: Clock
) -> None:
    """Return once one of the processes has ended; immediately if there are none."""
    while processes and all(process_state(process) != ENDED for process in processes):
        await clock.sleep(min(interval_s, _MAX_POLL_INTERVAL_S))


async def engine_death(
    processes: Sequence[psutil.Process] | None,
    client: Answers,
    receiver: Updated,
    *,
    timeout_s: float,
    interval_s: float,
    elsewhere: Callable[[], Awaitable[None]] | None = None,
    clock: Clock | None = None,
) -> str:
    """Wait until this engine is dead, and return the reason. `processes` are those that
    it cannot run without; None if they are not visible to us: then its silence tells,
    and `elsewhere`, if there is one, returns once it has ended on another node."""
    clock = clock or Clock()
    seen = processes or ()
    names = [_name(process) for process in seen]

    async def answers(deadline_s: float) -> bool:
        if _any_stopped(seen):
            return False
        was_loading = receiver.is_loading
        answered = await client.answers(deadline_s=deadline_s)
        return answered or was_loading or receiver.is_loading

    async def makes_tokens(deadline_s: float) -> bool:
        if receiver.is_paused or receiver.is_loading:
            return True
        generates = await client.generates(deadline_s=deadline_s)
        # If the engine was paused while we asked, the silence proves nothing.
        return generates or receiver.is_paused or receiver.is_loading

    token_timeout_s = TOKEN_TIMEOUTS * timeout_s
    causes: dict[str, Awaitable[None]] = {
        f"its scheduler has not answered for {timeout_s:g} s": until_silent(
            answers, timeout_s=timeout_s, interval_s=interval_s, clock=clock
        ),
        f"it has made no token for {token_timeout_s:g} s": until_silent(
            makes_tokens, timeout_s=token_timeout_s, interval_s=interval_s, clock=clock
        ),
    }
    if processes is not None:
        ended = until_ended(processes, interval_s=interval_s, clock=clock)
        causes["a process of it has ended"] = ended
    if elsewhere is not None:
        causes["it has ended on its node, or the node has"] = elsewhere()
    return await _first_cause(causes, seen, names)


async def wrong_reply(
    client: Generates,
    *,
    vocab_size: int,
    newest_version: WeightVersion,
    deadline_s: float,
) -> str:
    """Examine an engine with a short request. Returns the reason that its answer is
    impossible; "" if the answer is possible, or if there is none within `deadline_s`:
    `engine_death` judges silence."""
    prompt_T = np.arange(_EXAMINED_TOKENS, dtype=np.int32) % vocab_size
    request = GenerateRequest(
        rid=f"examination-{secrets.token_hex(8)}",
        input_ids_T=prompt_T,
        sampling=Sampling(max_new_tokens=_EXAMINED_TOKENS),
        ignore_eos=True,
    )
    claimed = 0
    try:
        async with (
            asyncio.timeout(deadline_s),
            contextlib.aclosing(client.stream(request)) as items,
        ):
            async for item in items:
                claimed = max(span.version for span in item.spans)
    except WrongReplyError as error:
        return str(error)
    except (InvrlError, TimeoutError) as error:
        _LOG.info("an engine did not answer its examination: %s", error)
        return ""
    if claimed > newest_version:
        return f"it claims weight version {claimed}; the newest is {newest_version}"
    return ""


async def router_death(
    processes: Sequence[psutil.Process],
    answers: Ask,
    *,
    timeout_s: float,
    interval_s: float,
    clock: Clock | None = None,
) -> str:
    """Wait until the router is dead, and return the reason. `processes` holds its
    process."""
    clock = clock or Clock()
    names = [_name(process) for process in processes]

    async def ask(deadline_s: float) -> bool:
        return not _any_stopped(processes) and await answers(deadline_s)

    causes: dict[str, Awaitable[None]] = {
        f"it has not answered for {timeout_s:g} s": until_silent(
            ask, timeout_s=timeout_s, interval_s=interval_s, clock=clock
        ),
        "its process has ended": until_ended(
            processes, interval_s=interval_s, clock=clock
        ),
    }
    return await _first_cause(causes, processes, names)


def _any_stopped(processes: Sequence[psutil.Process]) -> bool:
    return any(process_state(process) == STOPPED for process in processes)


def _name(process: psutil.Process) -> str:
    """Return a process's name for a message. Call this while the process lives."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.name()}, pid {process.pid}"
    return f"pid {process.pid}"


async def _first_cause(
    causes: Mapping[str, Awaitable[None]],
    processes: Sequence[psutil.Process],
    names: Sequence[str],
) -> str:
    """Return the first cause, and the states of the processes at that moment."""
    waits = {asyncio.ensure_future(wait): cause for cause, wait in causes.items()}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        first.result()
        states = [
            f"{name}: {process_state(process)}"
            for name, process in zip(names, processes, strict=True)
        ]
        if not states:
            return waits[first]
        return f"{waits[first]} ({'; '.join(states)})"
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
