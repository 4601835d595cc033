"""What others hold of the buffer: `interfaces.Buffer` over the Ray actor, every call with a deadline.
Picklable. What the actor raises keeps its type;
an actor that died is a ServerError."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from invrl.buffer.buffer_actor import BufferActor
from invrl.errors import DeadlineError, ServerError
from invrl.host.actor_heartbeat import ActorHeartbeat, beat_of
from invrl.host.ray_memory import killed_for_memory
from invrl.types import TakenBatch

Given = ParamSpec("Given")
Reply = TypeVar("Reply")


def _call(
    method: Callable[Concatenate[BufferActor, Given], Awaitable[Reply]],
) -> Callable[Concatenate[BufferHandle, Given], CoroutineType[Any, Any, Reply]]:
    """This method of the actor as one of the handle, within `call_timeout_s`."""

    async def call(handle: BufferHandle, /, *args: Given.args, **kwargs: Given.kwargs) -> Reply:
        reply: Awaitable[Reply] = getattr(handle.actor, method.__name__).remote(*args, **kwargs)
        return await handle._answer(method.__name__, reply, handle.call_timeout_s)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHandle:
    """`actor` is the Ray handle of a `BufferActor` (Ray's handles have no types of their own)."""

    actor: Any
    batch_timeout_s: float
    call_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 30.0

    snapshot = _call(BufferActor.snapshot)
    lease = _call(BufferActor.lease)
    record = _call(BufferActor.record)
    unwanted = _call(BufferActor.unwanted)
    trained = _call(BufferActor.trained)
    advance = _call(BufferActor.advance)
    metrics = _call(BufferActor.metrics)
    failures = _call(BufferActor.failures)
    waiting = _call(BufferActor.waiting)
    close = _call(BufferActor.close)

    async def start(self, snapshot: bytes | None = None) -> None:
        """Wait until the actor lives, has restored the snapshot of a checkpoint, and polls."""
        await self._answer("start", self.actor.start.remote(snapshot), self.batch_timeout_s)

    async def watch(self) -> None:
        """Once it has started. Returns never; raises ServerError if the actor does not answer."""
        heart = ActorHeartbeat("the buffer", lambda: beat_of(self.actor), timeout_s=self.heartbeat_timeout_s)
        await heart.watch()

    async def take(self) -> TakenBatch:
        """DeadlineError after batch_timeout_s, raised by the actor (here only if it does not answer)."""
        reply = self.actor.take.remote(self.batch_timeout_s)
        return await self._answer("take", reply, self.batch_timeout_s + self.call_timeout_s)

    async def _answer(self, name: str, reply: Awaitable[Reply], timeout_s: float) -> Reply:
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except RayTaskError as error:
            raise error.cause from error  # whose text is a traceback of Ray's
        except TimeoutError as error:
            raise DeadlineError(f"the buffer actor to answer {name}()", time.monotonic() - start) from error
        except (RayActorError, OutOfMemoryError) as error:
            if killed := killed_for_memory(error, "the buffer"):
                raise ServerError(killed) from error
            raise ServerError(f"the buffer actor died before it answered {name}(): {error}") from error
