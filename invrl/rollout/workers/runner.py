"""Calls user code on sessions and returns how each ended: a reward, or a failure
reason.

Invariant: nothing that a rollout function or reward function does (raise, hang, return
the wrong thing, sys.exit, swallow its cancellation) leaves `Runner.run` as an
exception. `os._exit` ends the process, which the worker pool notices.

Async functions run in the worker's event loop, sync ones in separate threads. A thread
cannot be ended from outside: those that outlive their deadline are counted, and the
pool replaces the worker. When a run is dropped, the function is cancelled as at a
deadline, but its threads get time to end: their session is closed, so their next call
fails.
"""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from invrl.errors import DeadlineError, SessionError
from invrl.host.output.masked_keys import SESSION_KEY_HIDDEN, without_session_keys
from invrl.interfaces import Endpoint, GroupRolloutFn, RewardFn, RolloutFn
from invrl.rollout.workers.advice import advice_on
from invrl.rollout.workers.held_time import HeldTime, never_held, wait_unheld
from invrl.rollout.workers.rewards import (
    Rejected,
    as_result,
    valid_components,
    valid_numbers,
    valid_reward,
)
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.reasons import FailureReason
from invrl.types.tasks import Task
from invrl.user_code.frame import USER_FRAME_PREFIX, raised_at, returned_at
from invrl.user_code.plugins import is_group_form

_CANCEL_GRACE_S = 1.0
_DROP_GRACE_S = 5.0
"""Time that the threads of a dropped run get to make a call in their session, which
fails."""
_DETAIL_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """User code gave a valid reward."""

    reward: float
    components: Mapping[str, float]
    extra: ExtraNumbers = ExtraNumbers()  # noqa: RUF009 - a constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """User code gave no reward."""

    reason: FailureReason
    detail: str


UserCodeResult = Scored | Failure


@dataclass(frozen=True, slots=True)
class _Raised:
    """An exception as a value, from code that must not raise."""

    error: BaseException


class _ThreadGoesOn(Exception):
    """A cancelled sync function still runs. The message is the stack of its thread."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One call of the rollout function, and its threads."""

    task: Task
    endpoints: Sequence[Endpoint]
    threads: list[asyncio.Future[object]] = field(default_factory=list)
    """One future per called sync function, set when the function has returned."""


class Runner:
    """One rollout function with its reward function and deadline."""

    def __init__(
        self,
        function: RolloutFn | GroupRolloutFn,
        reward_function: RewardFn | None,
        *,
        timeout_s: float,
    ) -> None:
        self._function: Callable[..., Any] = function
        self._group = is_group_form(function)
        self._reward_function = reward_function
        self._timeout_s = timeout_s
        self._abandoned: list[asyncio.Future[object]] = []

    @property
    def stuck_threads(self) -> int:
        """Threads of sync functions that still run although their runs have ended."""
        self._abandoned = [thread for thread in self._abandoned if not thread.done()]
        return len(self._abandoned)

    async def run(
        self,
        task: Task,
        endpoints: Sequence[Endpoint],
        dropped: asyncio.Event | None = None,
        held_s: HeldTime = never_held,
    ) -> list[UserCodeResult]:
        """Call the rollout function and score its return value. Returns one result per
        endpoint, in order, within the deadline, which does not count `held_s`. A
        function that is not a group form takes exactly one endpoint. Once `dropped` is
        set, the function is cancelled and the results are GROUP_DROPPED. The detail of
        a failure never holds a session's key."""
        run = _Run(task, endpoints)
        if dropped is None:
            dropped = asyncio.Event()
        try:
            results = await self._results_in_time(run, dropped, held_s)
        finally:
            # Only after the threads had their time to end: another run of this worker,
            # ending meanwhile, would report them as stuck.
            self._abandoned += run.threads
        return [_without_keys(result, endpoints) for result in results]

    async def _results_in_time(
        self, run: _Run, dropped: asyncio.Event, held_s: HeldTime
    ) -> list[UserCodeResult]:
        """Return the results, or the same failure for every endpoint: an exception, the
        drop or the deadline."""
        call = asyncio.create_task(_contained(self._results(run)))
        drop = asyncio.create_task(dropped.wait())
        try:
            known_held_s = await wait_unheld({call, drop}, self._timeout_s, held_s)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            drop.cancel()
        if call.done():
            results = call.result()
            if isinstance(results, list):
                return results
            failure = self._failure(results.error, run, self._function)
        elif dropped.is_set():
            detail = f"its group was dropped; {await _cancel(call)}"
            failure = Failure(reason=FailureReason.GROUP_DROPPED, detail=detail)
            if run.threads:
                await asyncio.wait(run.threads, timeout=_DROP_GRACE_S)
        else:
            limit = f"{self._timeout_s:g} s"
            if known_held_s:
                limit += f", besides {known_held_s:.0f} s for which the gate held it"
            detail = f"no result within {limit}; {await _cancel(call)}"
            failure = Failure(reason=FailureReason.TIMEOUT, detail=detail)
        return [failure] * len(run.endpoints)

    async def _results(self, run: _Run) -> list[UserCodeResult]:
        if self._group:
            endpoints = list(run.endpoints)
            returned = await self._call(run, self._function, run.task, endpoints)
            returned_G = _group_results(returned, len(endpoints))
        else:
            (endpoint,) = run.endpoints
            returned_G = [await self._call(run, self._function, run.task, endpoint)]
        scores = [self._score(run, returned) for returned in returned_G]
        return list(await asyncio.gather(*scores))

    async def _score(self, run: _Run, returned: object) -> UserCodeResult:
        """Return the reward of one return value of the rollout function, from the
        reward function if there is one."""
        function: Callable[..., Any] = self._function
        try:
            result = as_result(returned)
            reward: object = result.reward
            name = "the rollout function's reward"
            if self._reward_function is not None:
                function = self._reward_function
                reward = await self._call(run, function, run.task, result)
                name = "the reward function's reward"
            number = valid_reward(reward, name)
            function = self._function
            return Scored(
                reward=number,
                components=valid_components(result.components),
                extra=valid_numbers(result),
            )
        except BaseException as error:  # as in `_contained`
            return self._failure(error, run, function)

    def _failure(
        self, error: BaseException, run: _Run, function: Callable[..., Any]
    ) -> Failure:
        """Describe why user code failed. The last line of the detail names the line of
        user code."""
        failure = classify(error, run.endpoints)
        if isinstance(error, Rejected):
            place = returned_at(function)
        else:
            place = raised_at(error, function)
        lines = [failure.detail.rstrip(), advice_on(_chain(error))]
        if place:
            lines.append(f"{USER_FRAME_PREFIX}{place}")
        return Failure(
            reason=failure.reason, detail="\n".join(line for line in lines if line)
        )

    async def _call(
        self, run: _Run, function: Callable[..., Any], *arguments: object
    ) -> object:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        ):
            return await function(*arguments)
        returned = await self._call_in_thread(run, function, *arguments)
        if isinstance(returned, Awaitable):
            return await returned
        return returned

    async def _call_in_thread(
        self, run: _Run, function: Callable[..., Any], *arguments: object
    ) -> object:
        # Not the loop's executor: a few functions that hang would occupy its threads
        # for good.
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[object] = loop.create_future()
        run.threads.append(finished)
        context = contextvars.copy_context()

        def work() -> None:
            try:
                value = context.run(function, *arguments)
            except BaseException as error:
                value = _Raised(error)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(finished.set_result, value)

        thread = threading.Thread(target=work, name="rollout", daemon=True)
        thread.start()
        try:
            # a cancellation ends this wait and leaves the future as it is
            await asyncio.wait({finished})
        except asyncio.CancelledError:
            raise _ThreadGoesOn(_thread_stack(thread)) from None
        value = finished.result()
        if isinstance(value, _Raised):
            raise value.error
        return value


def _thread_stack(thread: threading.Thread) -> str:
    """Return the innermost frames of a running thread, or "" if it has none."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame)[-4:])


def classify(error: BaseException, endpoints: Sequence[Endpoint]) -> Failure:
    """Classify a failure of user code: EXCEPTION, unless the cause was a request to one
    of our endpoints: ENGINE for a 5xx or no server; CONTEXT, LIMIT or TIMEOUT if the
    session had no more context, turns, tokens or time."""
    if isinstance(error, Rejected):
        return Failure(reason=error.reason, detail=error.detail)
    gateway_origins = {_origin(httpx.URL(endpoint.base_url)) for endpoint in endpoints}
    reason = FailureReason.EXCEPTION
    # The chain leads from the error to its causes. The last match is the closest to the
    # request itself.
    for cause in _chain(error):
        if isinstance(cause, SessionError | DeadlineError):
            reason = _call_failure(cause) or reason
        elif _is_request_to(gateway_origins, cause):
            reason = _request_failure(cause) or reason
    return Failure(reason=reason, detail=_format_traceback(error))


def _format_traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # an exception's own __str__ is user code too
        return f"a {type(error).__name__} that cannot be shown"


def _is_request_to(
    origins: Collection[tuple[str, int | None]], error: BaseException
) -> bool:
    """Whether the error is that of an HTTP request to one of these hosts and ports."""
    request = _attribute(error, "request")
    return isinstance(request, httpx.Request) and _origin(request.url) in origins


def _call_failure(error: SessionError | DeadlineError) -> FailureReason | None:
    """Return the reason that a reward or a child session of our endpoint failed. None
    if the call itself was wrong."""
    if isinstance(error, DeadlineError) or error.status >= 500:
        return FailureReason.ENGINE
    return _EXHAUSTED.get(error.code)


def _request_failure(error: BaseException) -> FailureReason | None:
    """Return the reason that a request to one of our endpoints failed. None if the
    request itself was wrong."""
    response = _attribute(error, "response")
    exhausted = _exhausted(response)
    if exhausted is not None:
        return exhausted
    if isinstance(error, httpx.TimeoutException):
        return FailureReason.TIMEOUT
    if isinstance(error, httpx.TransportError):
        return FailureReason.ENGINE
    if isinstance(response, httpx.Response) and response.status_code >= 500:
        return FailureReason.ENGINE
    if _event_type(error) in _SERVER_FAULTS:
        return FailureReason.ENGINE
    return None


_SERVER_FAULTS = frozenset(
    {"server_error", "api_error", "overloaded_error", "timeout_error"}
)
"""Types of the error event that ends a stream where a whole response would be a 5xx."""


def _event_type(error: BaseException) -> object:
    """Return the type of the error event that ended a stream; None for any other error.
    OpenAI's client keeps what the event has under `error`, Anthropic's the event."""
    body = _attribute(error, "body")
    if not isinstance(body, dict):
        return None
    fields = body.get("error", body)
    return fields.get("type") if isinstance(fields, dict) else None


_EXHAUSTED = {
    "context_length_exceeded": FailureReason.CONTEXT,
    "prompt is too long": FailureReason.CONTEXT,
    "max_turns_exceeded": FailureReason.LIMIT,
    "max_tokens_exceeded": FailureReason.LIMIT,
    "the session has made its": FailureReason.LIMIT,
    "the session has sampled": FailureReason.LIMIT,
    "session_timeout": FailureReason.TIMEOUT,
    "the session is expired": FailureReason.TIMEOUT,
}
"""Reasons by a text in the gateway's refusal: an error code, or words of the message,
as Anthropic's errors have no code."""


def _exhausted(response: object) -> FailureReason | None:
    """Return the session limit that a refused request had reached; None for any other
    response."""
    if not isinstance(response, httpx.Response) or response.status_code not in (
        400,
        401,
        403,
    ):
        return None
    try:
        text = response.text
    except Exception:  # a streamed body that was not read
        return None
    for words, reason in _EXHAUSTED.items():
        if words in text:
            return reason
    return None


def _origin(url: httpx.URL) -> tuple[str, int | None]:
    return url.host, url.port


def _without_keys(
    result: UserCodeResult, endpoints: Sequence[Endpoint]
) -> UserCodeResult:
    """Shorten a failure's detail and remove session keys: base URLs hold them, and
    errors of HTTP clients hold URLs."""
    if not isinstance(result, Failure):
        return result
    detail = result.detail
    for endpoint in endpoints:
        detail = detail.replace(endpoint.api_key, SESSION_KEY_HIDDEN)
    detail = without_session_keys(detail)  # of children
    return Failure(reason=result.reason, detail=detail[-_DETAIL_CHARS:])


async def _contained(work: Awaitable[Any]) -> Any | _Raised:
    """Await `work` and return any exception as a value. SystemExit and
    KeyboardInterrupt would end the event loop if they left a task."""
    try:
        return await work
    except BaseException as error:
        return _Raised(error)


async def _cancel(call: asyncio.Task[list[UserCodeResult] | _Raised]) -> str:
    """Cancel the call and return a clause that says where it was."""
    call.cancel()
    done, _ = await asyncio.wait({call}, timeout=_CANCEL_GRACE_S)
    if not done:
        return "it ignores its cancellation"
    result = call.result()
    if not isinstance(result, _Raised):
        return "it swallowed its cancellation"
    if isinstance(result.error, _ThreadGoesOn):
        return f"its thread goes on, at:\n{result.error}"
    stack = "".join(traceback.format_tb(result.error.__traceback__)[-4:])
    return f"it was at:\n{stack}"


def _group_results(returned: object, num_endpoints: int) -> Sequence[object]:
    """Return the return value of a group form as one result per endpoint. Raises
    Rejected (BAD_RETURN)."""
    if isinstance(returned, np.ndarray):
        returned = list(returned)
    if not isinstance(returned, list | tuple):
        actual = type(returned).__name__
    elif len(returned) != num_endpoints:
        actual = f"{len(returned)} results"
    else:
        return returned
    detail = f"the group function returned {actual}, not a list of {num_endpoints} results, one for each endpoint"
    raise Rejected(FailureReason.BAD_RETURN, detail)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, contexts and grouped exceptions, at most 64:
    agent frameworks wrap errors many times."""
    seen: set[int] = set()
    pending = [error]
    while pending and len(seen) < 64:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            pending.extend(current.exceptions)
        if current.__cause__ is not None:
            pending.append(current.__cause__)
        if current.__context__ is not None:
            pending.append(current.__context__)


def _attribute(error: BaseException, name: str) -> object:
    """Return the exception's `request`, `response` or `body`, which httpx and the SDKs
    built on it set; None without one. Reading it may raise anything: httpx's property
    raises if it was not set, and an exception of the user's may define its own."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None
