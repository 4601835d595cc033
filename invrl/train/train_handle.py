"""All trainer ranks behind one handle: `interfaces.Trainer` and `interfaces.WeightSender`.

Invariant: a call ends on all ranks within its deadline (a failure up to 10 s later), or all ranks are ended:
ranks meet in collectives, so if one fails or dies the others would wait for it."""

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from invrl.errors import DeadlineError, InvrlError, TrainError
from invrl.host.actor_heartbeat import ActorHeartbeat, beat_of
from invrl.host.ray_memory import killed_for_memory
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.metrics import merge
from invrl.train.sharding import shard_batch
from invrl.types import TrainBatch, WeightVersion

_DEATH_S = 10.0
"""How long Ray may take to report a death. Ranks whose collective broke because of it report earlier."""


class TrainHandle:
    """`actors`: Ray handles of one `TrainActor` per rank, in rank order."""

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        num_minibatches: int,
        start_timeout_s: float,
        step_timeout_s: float,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        self._actors = list(actors)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._num_minibatches = num_minibatches
        self._start_timeout_s, self._step_timeout_s = start_timeout_s, step_timeout_s

    async def start(self) -> None:
        """Every rank has joined and holds the model. Raises ConfigError, TrainError, DeadlineError."""
        [port] = await self._wait("listen", [self._actors[0].listen.remote()], self._start_timeout_s)
        calls = [actor.start.remote(port) for actor in self._actors]
        await self._wait("start", calls, self._start_timeout_s)

    async def watch(self) -> None:
        """Once all ranks have started. Returns never; raises ServerError that names a rank which does not
        answer."""
        hearts = [
            ActorHeartbeat(
                f"trainer rank {rank}", partial(beat_of, actor), timeout_s=self._heartbeat_timeout_s
            )
            for rank, actor in enumerate(self._actors)
        ]
        watches = [asyncio.create_task(heart.watch()) for heart in hearts]
        try:
            await asyncio.gather(*watches)
        finally:
            for watch in watches:
                watch.cancel()

    async def train(self, batch: TrainBatch) -> StepResult:
        """Metrics merged over ranks, seconds of the slowest. Raises TrainError, DeadlineError."""
        shards = shard_batch(batch, ranks=len(self._actors), steps=self._num_minibatches)
        results: list[StepResult] = await self._all("train", list(map(ray.put, shards)))
        phases = sorted({phase for result in results for phase in result.seconds})
        seconds = {phase: max(one.seconds.get(phase, 0.0) for one in results) for phase in phases}
        metrics, steps = merge(result.metrics for result in results), results[0].optimizer_steps
        return StepResult(optimizer_steps=steps, metrics=metrics, seconds=seconds)

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        return await self._first("logprobs", prompts)

    async def token_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Of each sample's trained tokens under the current weights, 0 elsewhere: [T] each."""
        shards = shard_batch(batch, ranks=len(self._actors), steps=self._num_minibatches)
        answers = await self._all("token_logprobs", list(map(ray.put, shards)))
        samples = [one for shard in shards for mini_batch in shard for one in mini_batch.samples]
        pairs = zip(samples, chain(*answers), strict=True)
        by_sample = {id(sample): array_T for sample, array_T in pairs}
        return [by_sample[id(sample)] for sample in batch.samples]

    async def layout(self) -> WeightLayout:
        return await self._first("layout")

    async def stage(self, version: WeightVersion) -> StagedWeights:
        return await self._first("stage", version)

    async def save_checkpoint(self, path: str) -> None:
        await self._all("save_checkpoint", [path] * len(self._actors))

    async def load_checkpoint(self, path: str) -> None:
        await self._all("load_checkpoint", [path] * len(self._actors))

    async def batches_trained(self) -> int:
        """Since the start; asked after the batch that is under way."""
        return await self._first("batches_trained")

    async def export_hugging_face(self, path: str) -> None:
        await self._first("export_hugging_face", path)

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def _first(self, method: str, *arguments: object) -> Any:
        [answer] = await self._wait(method, [self._actors[0].call.remote(method, *arguments)])
        return answer

    async def _all(self, method: str, given: Sequence[object]) -> list[Any]:
        """`given`: the argument of each rank, in order."""
        pairs = zip(self._actors, given, strict=True)
        return await self._wait(method, [actor.call.remote(method, argument) for actor, argument in pairs])

    async def _wait(self, method: str, calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        timeout_s = timeout_s or self._step_timeout_s
        waits = [asyncio.wrap_future(call.future()) for call in calls]
        done, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if pending and any(_may_follow(wait.exception()) for wait in done):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_S):
                    while pending and not any(isinstance(w.exception(), RayActorError) for w in done):
                        late, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                        done |= late
        failed = [at for at, wait in enumerate(waits) if wait in done and wait.exception() is not None]
        if failed or pending:
            for wait in pending:
                wait.cancel()
            self.stop()
        if failed:
            # A rank that died is the cause; the errors of those that waited for it follow from that.
            errors = {at: waits[at].exception() for at in failed}
            at = next((at for at, error in errors.items() if isinstance(error, RayActorError)), failed[0])
            raise _cause(errors[at], f"trainer rank {at} failed in {method}") from errors[at]
        if pending:
            raise DeadlineError(f"{len(pending)} of {len(calls)} trainer ranks to finish {method}", timeout_s)
        return [wait.result() for wait in waits]


def _may_follow(error: BaseException | None) -> bool:
    """Whether the error may only be a consequence of another rank's failure."""
    return isinstance(error, RayTaskError) and not isinstance(error.cause, InvrlError)


def _cause(error: BaseException | None, what: str) -> Exception:
    """The rank's own error if it is an InvrlError, else a TrainError that says what it was."""
    if killed := killed_for_memory(error, what.partition(" failed in ")[0]):
        return TrainError(killed)
    if isinstance(error, RayTaskError):
        cause: Exception = error.cause
        if isinstance(cause, InvrlError):
            return cause
        return TrainError(f"{what}: {type(cause).__name__}: {cause}")
    return TrainError(f"{what}: {error!r}")
