"""Ray actors with typed calls that have deadlines, a heartbeat, and plain errors.

Ray's own handles have no types, wait forever, and raise Ray's exceptions. A role of the
run is a plain class with `async` methods (tests use it without Ray); `start_actor` runs
it in its own process, and `ActorHandle` calls it. Exceptions of the actor's code arrive
unchanged. A dead process raises ActorDiedError, and one that does not answer in time
ActorSilentError; both name the actor and the method.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    TaskCancelledError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from invrl.errors import ActorDiedError, ActorSilentError
from invrl.host.processes.awake_time import awake_wait
from invrl.host.ray.actor_heartbeat import ActorHeartbeat, Pulse
from invrl.host.ray.ray_memory import killed_for_memory

_DEATHS = (
    RayActorError,
    ActorUnschedulableError,
    OutOfMemoryError,
    TaskCancelledError,
)
"""Ray's errors if an actor's process has ended, or never began: its node is gone."""
_BEAT_GROUP = "beat"
"""Concurrency group in which a separate thread answers `beat`."""


class Role(Protocol):
    """Interface of an actor's class."""

    async def beat(self) -> Pulse:
        """Return the pulse immediately, even if other methods are busy."""
        ...


Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")
RoleT = TypeVar("RoleT", bound=Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorOptions:
    """Ray's options for an actor."""

    max_concurrency: int = 1000
    """Concurrent calls; further calls wait in Ray's queue. The default is Ray's for
    async actors."""
    node: str | None = None
    """Ray's id of the node that the actor is on; None: the node of this process, which
    has the run folder and the gateway."""
    num_gpus: int | None = None
    """GPUs that Ray gives the actor, which sees no others; None: it sees those that its
    node's processes see."""


@dataclass(frozen=True, slots=True)
class ActorHandle(Generic[RoleT]):
    """An actor of the class `RoleT`. Can be pickled."""

    name: str
    """Name in messages: "rollout worker 0"."""
    ray_handle: Any
    """Ray's own handle, which has no type."""

    async def call(
        self,
        method: Callable[Concatenate[RoleT, Parameters], Awaitable[Reply]],
        deadline_s: float,
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Reply:
        """Call a method, given as `Class.method`, and wait for its reply. Raises
        ActorSilentError after `deadline_s`, ActorDiedError, and what the method
        raises."""
        name = method.__name__
        reference = getattr(self.ray_handle, name).remote(*args, **kwargs)
        try:
            # Not `await reference`: that turns Ray's TaskCancelledError into a
            # cancellation of ours.
            reply = asyncio.wrap_future(reference.future())
            try:
                done, _ = await awake_wait([reply], deadline_s)
            finally:
                reply.cancel()
            if not done:
                raise ActorSilentError(f"{self.name} to answer {name}()", deadline_s)
            return reply.result()
        # In this order: an error raised in the actor is a RayTaskError and also has its
        # own class.
        except _DEATHS as error:
            # Code in the actor that cancels every task of its event loop cancels our
            # call too.
            reason = killed_for_memory(error, self.name)
            if not reason:
                reason = f"{self.name} died before it answered {name}(): {error}"
            raise ActorDiedError(reason) from error
        except RayTaskError as error:
            raise error.cause from error  # the text of `error` is the traceback in the actor's process

    async def beat(self) -> Pulse:
        reference = self.ray_handle.beat.options(concurrency_group=_BEAT_GROUP).remote()
        return await asyncio.wrap_future(reference.future())

    async def watch(self, timeout_s: float) -> None:
        """Poll heartbeats, once the actor has started. Never returns; raises
        ServerError once the actor has been silent for `timeout_s`. A process on this
        machine is killed then."""
        await ActorHeartbeat(self.name, self.beat, timeout_s=timeout_s).watch()

    def kill(self) -> None:
        """End the process. Calls that wait for its replies raise ActorDiedError."""
        ray.kill(self.ray_handle)


def is_unreachable(error: ActorDiedError) -> bool:
    """Whether the connection to the actor broke, and its process may live."""
    return isinstance(error.__cause__, ActorUnavailableError)


def own_node() -> str:
    """Return Ray's id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def start_actor(
    name: str,
    role: Callable[Parameters, RoleT],
    options: ActorOptions,
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> ActorHandle[RoleT]:
    """Start a process with an object of the class `role`, made there with these
    arguments. Returns immediately; an error of its constructor is raised by the first
    call. Ray neither restarts the actor nor repeats a call, nor chooses its node."""
    remote: Any = ray.remote
    actor_class = remote(concurrency_groups={_BEAT_GROUP: 1})(role)
    node = options.node or own_node()
    ray_handle = actor_class.options(
        max_concurrency=options.max_concurrency,
        max_restarts=0,
        max_task_retries=0,
        num_cpus=0,
        num_gpus=options.num_gpus,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(*args, **kwargs)
    return ActorHandle(name, ray_handle)
