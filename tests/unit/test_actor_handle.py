"""Calls of a Ray actor, without Ray: arguments and answers pass, and every failure is
an error of ours."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from invrl.errors import ActorDiedError, ActorSilentError, DeadlineError, ServerError
from invrl.host.ray.actor import ActorHandle
from invrl.host.ray.actor_heartbeat import Pulse, pulse


class Adder:
    """A role."""

    async def beat(self) -> Pulse:
        return pulse()

    async def add(self, first: int, *, second: int) -> int:
        return first + second


def answering(
    answer: Future[int], calls: list[object] | None = None
) -> ActorHandle[Adder]:
    """A handle of an actor whose method `add` answers so."""

    def remote(*args: object, **kwargs: object) -> SimpleNamespace:
        if calls is not None:
            calls.append((args, kwargs))
        return SimpleNamespace(future=lambda: answer)

    return ActorHandle("the adder", SimpleNamespace(add=SimpleNamespace(remote=remote)))


def failing(error: Exception) -> ActorHandle[Adder]:
    answer: Future[int] = Future()
    answer.set_exception(error)
    return answering(answer)


async def test_actor_handle_passes_arguments_and_the_reply() -> None:
    answer: Future[int] = Future()
    answer.set_result(3)
    calls: list[object] = []
    assert await answering(answer, calls).call(Adder.add, 60.0, 1, second=2) == 3
    assert calls == [((1,), {"second": 2})]


async def test_silent_actor_is_named_with_the_called_method() -> None:
    with pytest.raises(
        ActorSilentError, match=r"waited 0\.0 s for the adder to answer add\(\)"
    ) as raised:
        await answering(Future()).call(Adder.add, 0.01, 1, second=2)
    assert isinstance(raised.value, DeadlineError)


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        TaskCancelledError(),
    ],
)
async def test_dead_actor_is_named_with_the_called_method(error: Exception) -> None:
    with pytest.raises(
        ActorDiedError, match=r"the adder died before it answered add\(\)"
    ) as raised:
        await failing(error).call(Adder.add, 60.0, 1, second=2)
    assert isinstance(raised.value, ServerError)


@pytest.mark.parametrize(
    "cause",
    [
        ZeroDivisionError("no"),
        TimeoutError("late"),
        DeadlineError("a batch", 1),
    ],
)
async def test_error_of_an_actor_method_keeps_its_type(cause: Exception) -> None:
    """A TimeoutError of the method is not a deadline of the call."""
    error = RayTaskError("add", "its traceback", cause).as_instanceof_cause()
    with pytest.raises(type(cause)) as raised:
        await failing(error).call(Adder.add, 60.0, 1, second=2)
    assert type(raised.value) is type(cause)


async def test_cancelled_call_of_an_actor_is_cancelled() -> None:
    call = asyncio.ensure_future(
        answering(Future()).call(Adder.add, 3600.0, 1, second=2)
    )
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
