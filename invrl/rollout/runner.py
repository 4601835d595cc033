"""Runs user code on sessions and says how it ended: a reward, or a reason why there is none.

Invariant: nothing that a rollout function or reward function does (raise, hang, return the wrong thing,
sys.exit, swallow its cancellation) leaves `Runner.run` as an exception; `os._exit` is the worker pool's to
see. Async functions run in the worker's event loop, sync ones in a thread of their own, which cannot be
ended: those that outlive their deadline are counted, the pool replaces the worker. A run that is dropped ends
as one that is late, but its threads get time to end: their session is closed, so their next call fails."""

import asyncio
import contextlib
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from invrl.interfaces import Endpoint, GroupRolloutFn, RewardFn, RolloutFn
from invrl.plugins import is_group_form
from invrl.rollout.rewards import Rejected, as_result, valid_components, valid_reward
from invrl.types import FailureReason, Task
from invrl.user_frame import USER_FRAME_PREFIX, raised_at, returned_at

_CANCEL_GRACE_S = 1.0
_DROP_GRACE_S = 5.0
"""For the threads of a run that is dropped, to come to a call of their session, which fails."""
_DETAIL_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    reward: float
    components: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    reason: FailureReason
    detail: str


UserCodeResult = Scored | Failure


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class _ThreadGoesOn(Exception):
    """The message is where the thread is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One call of the rollout function, with all that belongs to it."""

    task: Task
    endpoints: Sequence[Endpoint]
    threads: list[asyncio.Future[object]] = field(default_factory=list)
    """What became of each sync function that it called, once it has returned."""


class Runner:
    """One rollout function with its reward function and deadline."""

    def __init__(
        self, function: RolloutFn | GroupRolloutFn, reward_function: RewardFn | None, *, timeout_s: float
    ) -> None:
        self._function: Callable[..., Any] = function
        self._group = is_group_form(function)
        self._reward_function = reward_function
        self._timeout_s = timeout_s
        self._abandoned: list[asyncio.Future[object]] = []

    @property
    def stuck_threads(self) -> int:
        """Threads of sync functions that are still running although nobody waits for them any more."""
        self._abandoned = [thread for thread in self._abandoned if not thread.done()]
        return len(self._abandoned)

    async def run(
        self, task: Task, endpoints: Sequence[Endpoint], dropped: asyncio.Event | None = None
    ) -> list[UserCodeResult]:
        """One outcome per endpoint, in order, within the deadline. A function that is not a group form
        takes exactly one endpoint. Once `dropped` is set the function is cancelled and the outcomes are
        GROUP_DROPPED. What is said of a failure holds no session's key."""
        run = _Run(task, endpoints)
        try:
            outcomes = await self._outcomes(run, dropped or asyncio.Event())
        finally:
            # Not before its time to end is over: a run that ends meanwhile would report it as stuck.
            self._abandoned += run.threads
        return [_printable(each, endpoints) if isinstance(each, Failure) else each for each in outcomes]

    async def _outcomes(self, run: _Run, dropped: asyncio.Event) -> list[UserCodeResult]:
        work = asyncio.create_task(_contained(self._results(run)))
        drop = asyncio.create_task(dropped.wait())
        try:
            await asyncio.wait({work, drop}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            drop.cancel()
        if work.done():
            ended = work.result()
            if isinstance(ended, list):
                return ended
            failure = self._failure(ended.error, run, self._function)
        elif dropped.is_set():
            detail = f"its group was dropped; {await _cancelled(work)}"
            failure = Failure(reason=FailureReason.GROUP_DROPPED, detail=detail)
            if run.threads:
                await asyncio.wait(run.threads, timeout=_DROP_GRACE_S)
        else:
            detail = f"no result within {self._timeout_s:g} s; {await _cancelled(work)}"
            failure = Failure(reason=FailureReason.TIMEOUT, detail=detail)
        return [failure] * len(run.endpoints)

    async def _results(self, run: _Run) -> list[UserCodeResult]:
        if not self._group:
            (endpoint,) = run.endpoints
            returned_G: Sequence[object] = [await self._call(run, self._function, run.task, endpoint)]
        else:
            endpoints = list(run.endpoints)
            returned = await self._call(run, self._function, run.task, endpoints)
            returned_G = _one_each(returned, len(endpoints))
        return list(await asyncio.gather(*(self._score(run, each) for each in returned_G)))

    async def _score(self, run: _Run, returned: object) -> UserCodeResult:
        """The reward of what the rollout function returned, with the reward function if there is one."""
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
            return Scored(reward=number, components=valid_components(result.components))
        except BaseException as error:  # as in `_contained`
            return self._failure(error, run, function)

    def _failure(self, error: BaseException, run: _Run, function: Callable[..., Any]) -> Failure:
        """Why user code failed. The last line of what is said names the line of user code."""
        failure = classify(error, run.endpoints)
        place = returned_at(function) if isinstance(error, Rejected) else raised_at(error, function)
        if not place:
            return failure
        return Failure(reason=failure.reason, detail=f"{failure.detail.rstrip()}\n{USER_FRAME_PREFIX}{place}")

    async def _call(self, run: _Run, function: Callable[..., Any], *arguments: object) -> object:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(*arguments)
        returned = await self._call_in_thread(run, function, *arguments)
        return await returned if isinstance(returned, Awaitable) else returned

    async def _call_in_thread(self, run: _Run, function: Callable[..., Any], *arguments: object) -> object:
        # Not the loop's executor: a handful of hanging functions would fill it for good.
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[object] = loop.create_future()
        run.threads.append(ended)
        context = contextvars.copy_context()

        def work() -> None:
            try:
                value = context.run(function, *arguments)
            except BaseException as error:
                value = _Raised(error)
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(ended.set_result, value)

        thread = threading.Thread(target=work, name="rollout", daemon=True)
        thread.start()
        try:
            await asyncio.wait({ended})  # a cancellation ends this wait, not what it waits for
        except asyncio.CancelledError:
            frame = sys._current_frames().get(thread.ident or 0)
            raise _ThreadGoesOn("".join(traceback.format_stack(frame)[-4:]) if frame else "") from None
        value = ended.result()
        if isinstance(value, _Raised):
            raise value.error
        return value


def classify(error: BaseException, endpoints: Sequence[Endpoint]) -> Failure:
    """Why user code failed. Where a request to an endpoint of ours was what failed: ENGINE for a 5xx or no
    server; CONTEXT, LIMIT and TIMEOUT where the session had no more context, turns, tokens or time."""
    if isinstance(error, Rejected):
        return Failure(reason=error.reason, detail=error.detail)
    ours = {_origin(httpx.URL(endpoint.base_url)) for endpoint in endpoints}
    reason = FailureReason.EXCEPTION
    for each in _chain(error):
        request, response = _carried(each, "request"), _carried(each, "response")
        if not isinstance(request, httpx.Request) or _origin(request.url) not in ours:
            continue
        failed = isinstance(response, httpx.Response) and response.status_code >= 500
        used_up = _used_up(response)
        if used_up is not None:
            reason = used_up
        elif isinstance(each, httpx.TimeoutException):
            reason = FailureReason.TIMEOUT
        elif isinstance(each, httpx.TransportError) or failed:
            reason = FailureReason.ENGINE
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # what an exception says of itself is user code too
        text = f"a {type(error).__name__} that cannot be shown"
    return Failure(reason=reason, detail=text)


_USED_UP = {
    "context_length_exceeded": FailureReason.CONTEXT,
    "prompt is too long": FailureReason.CONTEXT,
    "max_turns_exceeded": FailureReason.LIMIT,
    "max_tokens_exceeded": FailureReason.LIMIT,
    "the session has made its": FailureReason.LIMIT,
    "the session has sampled": FailureReason.LIMIT,
    "session_timeout": FailureReason.TIMEOUT,
    "the session is expired": FailureReason.TIMEOUT,
}
"""What the gateway's refusals hold: a code; in Anthropic's errors, which have none, words of the message."""


def _used_up(response: object) -> FailureReason | None:
    """What of its session a refused request would have needed more of."""
    if not isinstance(response, httpx.Response) or response.status_code not in (400, 401, 403):
        return None
    try:
        text = response.text
    except Exception:  # a streamed body that nobody has read
        return None
    return next((reason for words, reason in _USED_UP.items() if words in text), None)


def _origin(url: httpx.URL) -> tuple[str, int | None]:
    return url.host, url.port


def _printable(failure: Failure, endpoints: Sequence[Endpoint]) -> Failure:
    """Bounded, and without keys: base URLs hold them, and errors of HTTP clients name URLs."""
    text = failure.detail
    for endpoint in endpoints:
        text = text.replace(endpoint.api_key, "(session key)")
    return Failure(reason=failure.reason, detail=text[-_DETAIL_CHARS:])


async def _contained(work: Awaitable[Any]) -> Any | _Raised:
    """SystemExit and KeyboardInterrupt would end the event loop if they left a task."""
    try:
        return await work
    except BaseException as error:
        return _Raised(error)


async def _cancelled(work: asyncio.Task[list[UserCodeResult] | _Raised]) -> str:
    """Cancels; returns where the work was."""
    work.cancel()
    done, _ = await asyncio.wait({work}, timeout=_CANCEL_GRACE_S)
    if not done:
        return "it ignores its cancellation"
    ended = work.result()
    if not isinstance(ended, _Raised):
        return "it swallowed its cancellation"
    if isinstance(ended.error, _ThreadGoesOn):
        return f"its thread goes on, at:\n{ended.error}"
    return f"it was at:\n{''.join(traceback.format_tb(ended.error.__traceback__)[-4:])}"


def _one_each(returned: object, wanted: int) -> Sequence[object]:
    if isinstance(returned, np.ndarray):
        returned = list(returned)
    if isinstance(returned, list | tuple) and len(returned) == wanted:
        return returned
    got = f"{len(returned)} results" if isinstance(returned, list | tuple) else type(returned).__name__
    detail = f"the group function returned {got}, not a list of {wanted} results, one for each endpoint"
    raise Rejected(FailureReason.BAD_RETURN, detail)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from and what it groups; agent frameworks wrap freely."""
    seen: set[int] = set()
    left = [error]
    while left and len(seen) < 64:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            left.extend(each.exceptions)
        left.extend(cause for cause in (each.__cause__, each.__context__) if cause is not None)


def _carried(error: BaseException, name: str) -> object:
    """httpx and the SDKs built on it carry `request` and `response`; reading httpx's raises where it has
    none, and an exception of the user's may raise anything."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None
