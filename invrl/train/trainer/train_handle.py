"""All trainer ranks behind one handle: `interfaces.Trainer` and
`interfaces.WeightSender`.

A call ends on all ranks, or all ranks are killed (`ranks/rank_calls.py`).

A critic may have separate ranks. They are numbered after the policy's, so that one rule
holds for the life of all; they meet in a separate group, and values and returns go
through this process.
"""

import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from invrl.host.ray.actor import ActorHandle
from invrl.host.ray.actor_heartbeat import Pulse
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train.batches.sharding import Shard, by_sample, shard_batch
from invrl.train.cost.model_size import UNKNOWN_MODEL, ComputeCost
from invrl.train.critic.critic_actor import CriticActor
from invrl.train.critic.critic_values import CriticValues, reorder_values
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import CRITIC_FOLDER
from invrl.train.ranks.rank_actor import RankActor
from invrl.train.ranks.rank_calls import RankCalls
from invrl.train.ranks.rank_group import RankGroup
from invrl.train.step.token_records import batch_records
from invrl.train.trainer.train_actor import TrainActor
from invrl.types.batches import TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import Metric, merge
from invrl.types.weights import WeightVersion

Parameters = ParamSpec("Parameters")
Reply = TypeVar("Reply")
_PLACE_TIMEOUT_S = 5.0


class TrainHandle:
    """Handle of all ranks. `actors` has one per rank of the policy, in rank order."""

    def __init__(
        self,
        actors: Sequence[ActorHandle[TrainActor]],
        *,
        layout: ParallelLayout,
        critic: RankGroup[CriticActor] | None = None,
        num_mini_batches: int,
        cost: ComputeCost = UNKNOWN_MODEL,
        add_samples: Callable[[TrainBatch], TrainBatch] | None = None,
        start_timeout_s: float,
        step_timeout_s: float,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """`critic`: its separate ranks. `add_samples` adds the objective's samples to
        every batch that is trained or evaluated."""
        self._policy = RankGroup(actors=actors, layout=layout)
        self._critic = None
        self._groups: list[RankGroup[Any]] = [self._policy]
        if critic is not None:
            self._critic = replace(critic, first=len(actors), folder=CRITIC_FOLDER)
            self._groups.append(self._critic)
        self._copy = layout.model_copy(0)
        """Ranks that hold the first copy of the model. The first of them collects its
        weights."""
        everyone = [actor for group in self._groups for actor in group.actors]
        self._everyone = RankCalls(everyone, heartbeat_timeout_s=heartbeat_timeout_s)
        self._num_mini_batches = num_mini_batches
        self._cost = cost
        self._add_samples = add_samples
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s
        self._held_version: WeightVersion | None = None
        """Version that the ranks' parameters are. None once they have changed."""

    async def start(self) -> None:
        """Start all ranks. Returns once every rank has joined and holds the model.
        Raises ConfigError, TrainError, DeadlineError."""
        timeout_s = self._start_timeout_s
        listening: dict[int, Coroutine[Any, Any, int]] = {}
        for group in self._groups:
            listening |= group.calls([0], timeout_s, RankActor.listen)
        ports = await self._everyone.wait("listen", listening, timeout_s)
        starting: dict[int, Coroutine[Any, Any, Pulse]] = {}
        for group in self._groups:
            port = ports[group.first]
            starting |= group.calls(group.ranks, timeout_s, RankActor.start, port)
        self._everyone.processes = await self._everyone.wait(
            "start", starting, timeout_s
        )

    def local_pids(self) -> Mapping[str, int]:
        """Return the processes of the ranks on this machine that have started, by name,
        such as "rank-0" and, for a critic's separate ranks, "critic-0"."""
        here = os.uname().nodename
        pids: dict[str, int] = {}
        for group in self._groups:
            kind = "rank" if group is self._policy else "critic"
            for rank in group.ranks:
                pulse = self._everyone.processes.get(group.first + rank)
                if pulse is not None and pulse.host == here:
                    pids[f"{kind}-{rank}"] = pulse.pid
        return pids

    async def watch(self) -> None:
        """See `RankCalls.watch`."""
        await self._everyone.watch()

    async def sleep(self) -> int:
        """Let every rank release the memory that only training needs to its engines.
        Returns the bytes that are then free on the fullest device. Raises TrainError,
        DeadlineError."""
        return min((await self._call(self._policy.ranks, TrainActor.sleep)).values())

    async def wake(self) -> int:
        """Let every rank take that memory again. Returns the bytes that were free
        before. Raises like `sleep`."""
        return min((await self._call(self._policy.ranks, TrainActor.wake)).values())

    async def train(self, batch: TrainBatch) -> StepResult:
        """Train a batch. Metrics are merged over the replicas, seconds are those of the
        slowest rank. Raises TrainError, DeadlineError."""
        self._held_version = None
        given = batch
        if self._add_samples is not None:
            batch = self._add_samples(batch)
        if self._critic is not None:
            return await self._train_beside_critic(batch, self._critic, given)
        shards = self._shards(batch, self._policy)
        results = await self._call_with_shards(TrainActor.train, shards)
        reported = self._policy.reported(results)
        records = batch_records(
            given, shards, [result.token_records for result in reported]
        )
        return replace(_step_result(reported, results.values()), token_records=records)

    async def _train_beside_critic(
        self, batch: TrainBatch, critic: RankGroup[CriticActor], given: TrainBatch
    ) -> StepResult:
        """Train with separate critic ranks: they value the batch while the policy's
        compute its log-probs; the policy's compute advantages and returns; then both
        learn at the same time. `given` is the batch without the samples that the
        objective adds."""
        policy = self._policy
        ends = time.monotonic() + self._step_timeout_s
        shards = self._shards(batch, policy)
        critic_shards = self._shards(batch, critic)

        def left_s() -> float:
            return max(0.0, ends - time.monotonic())

        async def wait(
            method: str, *calls: Mapping[int, Coroutine[Any, Any, Any]]
        ) -> dict[int, Any]:
            by_rank = {rank: call for part in calls for rank, call in part.items()}
            return await self._everyone.wait(method, by_rank, left_s())

        replies = await wait(
            "prepare",
            critic.calls_by_replica(left_s(), CriticActor.values, critic_shards),
            policy.calls_by_replica(left_s(), TrainActor.prepare, shards),
        )
        valued: list[CriticValues] = critic.reported(replies)
        values = reorder_values(
            shards, critic_shards, [of_replica.values for of_replica in valued]
        )
        replies = await wait(
            "compute_advantages",
            policy.calls_by_replica(left_s(), TrainActor.compute_advantages, values),
        )
        returns = reorder_values(critic_shards, shards, policy.reported(replies))
        results: dict[int, StepResult] = await wait(
            "learn",
            policy.calls(
                policy.ranks,
                left_s(),
                TrainActor.learn,
                critic_learns_alone=valued[0].learns_alone,
            ),
            critic.calls_by_replica(left_s(), CriticActor.learn, returns),
        )
        reported = policy.reported(results)
        records = batch_records(
            given, shards, [result.token_records for result in reported]
        )
        return replace(
            _step_result([*reported, *critic.reported(results)], results.values()),
            token_records=records,
        )

    async def evaluate(self, batch: TrainBatch) -> dict[str, Metric]:
        """Return the objective's metrics of a batch that is not trained, in which all
        samples count together. Raises TrainError, DeadlineError."""
        if self._add_samples is not None:
            batch = self._add_samples(batch)
        shards = shard_batch(
            batch, ranks=self._policy.layout.data, steps=1, cost=self._cost
        )
        measured = await self._call_with_shards(TrainActor.evaluate, shards)
        return merge(self._policy.reported(measured))

    async def place_text(self) -> str:
        """Return rank 0's current work, as text. A failure kills no rank. Raises
        ServerError, DeadlineError."""
        actor = self._policy.actors[0]
        return str(await actor.call(TrainActor.place, _PLACE_TIMEOUT_S))

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        replies = await self._call(self._copy, TrainActor.logprobs, prompts)
        return replies[self._policy.layout.reporter(0)]

    async def token_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return log-probs of each sample's trained tokens under the current weights, 0
        elsewhere: [T] each."""
        shards = self._shards(batch, self._policy)
        replies = await self._call_with_shards(TrainActor.token_logprobs, shards)
        logprobs_of = by_sample(shards, self._policy.reported(replies))
        return [logprobs_of[id(sample)] for sample in batch.samples]

    async def layout(self) -> WeightLayout:
        return (await self._call([0], TrainActor.layout))[0]

    async def stage(self, version: WeightVersion) -> StagedWeights:
        replies = await self._call(self._copy, TrainActor.stage, version)
        staged = replies[self._copy[0]]
        assert staged is not None, "the first rank of a copy collects its weights"
        self._held_version = version
        return staged

    def holds(self, version: WeightVersion) -> bool:
        """Whether a bucket that is asked for now is of this version: calls reach the
        ranks in their order."""
        return self._held_version == version

    async def bucket(self, index: int, copies: int) -> list[str]:
        """See `BucketSender.bucket`."""
        replies = await self._call(self._copy, TrainActor.bucket, index, copies)
        payloads = replies[self._copy[0]]
        assert payloads is not None, "the first rank of a copy collects its weights"
        return payloads

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """See `Broadcaster.offer`."""
        first = self._copy[0]
        return (await self._call([first], TrainActor.offer, version, engines))[first]

    async def save_checkpoint(self, path: str) -> FileEntries:
        """Save a checkpoint. The critic's separate ranks write after the policy's, into
        a folder below."""
        entries: FileEntries = {}
        for group in self._groups:
            saved = await self._call_group(
                group, RankActor.save_checkpoint, str(Path(path, group.folder))
            )
            entries = {**entries, **group.files(saved)}
        return entries

    async def copy_model(self, path: str) -> None:
        await self._call(self._copy, TrainActor.copy_model, path)

    async def copy_checkpoint(self, path: str) -> None:
        for group in self._groups:
            await self._call_group(
                group, RankActor.copy_checkpoint, str(Path(path, group.folder))
            )

    async def model_written(self) -> FileEntries:
        return (await self._call([0], TrainActor.model_written))[0]

    async def checkpoint_written(self) -> None:
        for group in self._groups:
            await self._call_group(group, RankActor.checkpoint_written)

    async def finish_checkpoint(self) -> FileEntries:
        entries: FileEntries = {}
        for group in self._groups:
            finished = await self._call_group(group, RankActor.finish_checkpoint)
            entries = {**entries, **group.files(finished)}
        return entries

    async def load_checkpoint(self, path: str) -> None:
        self._held_version = None
        for group in self._groups:
            await self._call_group(group, RankActor.load_checkpoint, path)

    async def batches_trained(self) -> int:
        """Return the number of batches trained since the start, after the current
        one."""
        return (await self._call([0], TrainActor.batches_trained))[0]

    async def export_hugging_face(self, path: str) -> FileEntries:
        entries = await self._call(self._copy, TrainActor.export_hugging_face, path)
        return entries[self._copy[0]]

    def stop(self) -> None:
        self._everyone.stop()

    def _shards(self, batch: TrainBatch, group: RankGroup[Any]) -> list[Shard]:
        """Return one shard per replica of the group."""
        return shard_batch(
            batch,
            ranks=group.layout.data,
            steps=self._num_mini_batches,
            cost=self._cost,
        )

    async def _call(
        self,
        ranks: Sequence[int],
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Reply]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Reply]:
        """Call a method on these ranks of the policy, with the same arguments. Replies
        are by rank."""
        timeout_s = self._step_timeout_s
        calls = self._policy.calls(ranks, timeout_s, method, *args, **kwargs)
        return await self._everyone.wait(method.__name__, calls, timeout_s)

    async def _call_group(
        self,
        group: RankGroup[Any],
        method: Callable[Concatenate[RankActor[Any], Parameters], Awaitable[Reply]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Reply]:
        """Call a method that ranks of policy and critic have, on all of a group."""
        timeout_s = self._step_timeout_s
        calls = group.calls(group.ranks, timeout_s, method, *args, **kwargs)
        return await self._everyone.wait(method.__name__, calls, timeout_s)

    async def _call_with_shards(
        self,
        method: Callable[[TrainActor, Shard], Awaitable[Reply]],
        shards: Sequence[Shard],
    ) -> dict[int, Reply]:
        """Call a method on every rank of the policy, with the shard of its replica."""
        timeout_s = self._step_timeout_s
        calls = self._policy.calls_by_replica(timeout_s, method, shards)
        return await self._everyone.wait(method.__name__, calls, timeout_s)


def _step_result(
    reported: Sequence[StepResult], all_results: Iterable[StepResult]
) -> StepResult:
    """Merge results. `reported` has one per replica, the policy's first. Seconds are
    those of the slowest rank."""
    seconds: dict[str, float] = {}
    for result in all_results:
        for phase, spent in result.seconds.items():
            seconds[phase] = max(spent, seconds.get(phase, 0.0))
    return StepResult(
        optimizer_steps=reported[0].optimizer_steps,
        nonfinite_steps=max(result.nonfinite_steps for result in reported),
        metrics=merge(result.metrics for result in reported),
        seconds=dict(sorted(seconds.items())),
    )
