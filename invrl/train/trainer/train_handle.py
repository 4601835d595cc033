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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from invrl.host.ray.actor import ActorHandle
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train.batches.sharding import Shard, shard_batch
from invrl.train.cost.model_size import UNKNOWN_MODEL, ComputeCost
from invrl.train.critic.critic_actor import CriticActor
from invrl.train.critic.critic_values import CriticValues, reorder_values
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import CRITIC_FOLDER
from invrl.train.ranks.rank_actor import RankActor
from invrl.train.ranks.rank_calls import RankCalls, call_deadline
from invrl.train.step.token_records import batch_records
from invrl.train.trainer.train_actor import TrainActor
from invrl.types.batches import TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import Metric, merge
from invrl.types.weights import WeightVersion

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
Argument = TypeVar("Argument")
ActorT = TypeVar("ActorT", bound=RankActor[Any])
_PLACE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticRanks:
    """Separate ranks of a critic."""

    actors: Sequence[ActorHandle[CriticActor]]
    layout: ParallelLayout


class TrainHandle:
    """Handle of all ranks. `actors` has one per rank of the policy, in rank order."""

    def __init__(
        self,
        actors: Sequence[ActorHandle[TrainActor]],
        *,
        layout: ParallelLayout,
        critic: CriticRanks | None = None,
        num_mini_batches: int,
        cost: ComputeCost = UNKNOWN_MODEL,
        add_samples: Callable[[TrainBatch], TrainBatch] | None = None,
        start_timeout_s: float,
        step_timeout_s: float,
        heartbeat_timeout_s: float = 30.0,
    ) -> None:
        """`add_samples` adds the objective's samples to every batch that is trained or
        evaluated."""
        self._actors = list(actors)
        self._layout = layout
        self._critic = critic
        everyone: list[ActorHandle[Any]] = [*actors, *(critic.actors if critic else ())]
        self._everyone = RankCalls(everyone, heartbeat_timeout_s=heartbeat_timeout_s)
        """Calls of all ranks: the critic's are numbered after the policy's."""
        self._num_mini_batches = num_mini_batches
        self._cost = cost
        self._add_samples = add_samples
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s

    async def start(self) -> None:
        """Start all ranks. Returns once every rank has joined and holds the model.
        Raises ConfigError, TrainError, DeadlineError."""
        timeout_s = self._start_timeout_s
        calls_to_listen = self._calls([0], timeout_s, TrainActor.listen)
        calls_to_listen |= self._critic_calls([0], timeout_s, CriticActor.listen)
        ports = await self._everyone.wait("listen", calls_to_listen, timeout_s)
        calls = self._calls(self._all_ranks, timeout_s, TrainActor.start, ports[0])
        if self._critic is not None:
            port = ports[self._number_in_critic(0)]
            calls |= self._critic_calls(
                self._critic_ranks, timeout_s, CriticActor.start, port
            )
        self._everyone.processes = await self._everyone.wait("start", calls, timeout_s)

    def local_pids(self) -> Mapping[str, int]:
        """Return the processes of the ranks on this machine that have started, by name,
        such as "rank-0" and, for a critic's separate ranks, "critic-0"."""
        here = os.uname().nodename
        pids: dict[str, int] = {}
        for number, pulse in self._everyone.processes.items():
            in_critic = number - self._number_in_critic(0)
            name = f"rank-{number}" if in_critic < 0 else f"critic-{in_critic}"
            if pulse.host == here:
                pids[name] = pulse.pid
        return pids

    async def watch(self) -> None:
        """See `RankCalls.watch`."""
        await self._everyone.watch()

    async def sleep(self) -> int:
        """Let every rank release the memory that only training needs to its engines.
        Returns the bytes that are then free on the fullest device. Raises TrainError,
        DeadlineError."""
        return min((await self._call_all(TrainActor.sleep)).values())

    async def wake(self) -> int:
        """Let every rank take that memory again. Returns the bytes that were free
        before. Raises like `sleep`."""
        return min((await self._call_all(TrainActor.wake)).values())

    async def train(self, batch: TrainBatch) -> StepResult:
        """Train a batch. Metrics are merged over the replicas, seconds are those of the
        slowest rank. Raises TrainError, DeadlineError."""
        given = batch
        if self._add_samples is not None:
            batch = self._add_samples(batch)
        if self._critic is not None:
            return await self._train_beside_critic(batch, self._critic, given)
        shards = self._shards(batch)
        results = await self._call_with_shards(TrainActor.train, shards)
        reported = self._reported(results)
        records = batch_records(
            given, shards, [result.token_records for result in reported]
        )
        return replace(_step_result(reported, results.values()), token_records=records)

    async def _train_beside_critic(
        self, batch: TrainBatch, critic: CriticRanks, given: TrainBatch
    ) -> StepResult:
        """Train with separate critic ranks: they value the batch while the policy's
        compute its log-probs; the policy's compute advantages and returns; then both
        learn at the same time. `given` is the batch without the samples that the
        objective adds."""
        ends = time.monotonic() + self._step_timeout_s
        shards = self._shards(batch)
        of_critic = shard_batch(
            batch,
            ranks=critic.layout.data,
            steps=self._num_mini_batches,
            cost=self._cost,
        )

        def left_s() -> float:
            return max(0.0, ends - time.monotonic())

        timeout_s = left_s()
        valuing = self._calls_by_replica(
            critic.actors, critic.layout, timeout_s, CriticActor.values, of_critic
        )
        preparing = self._calls_by_replica(
            self._actors, self._layout, timeout_s, TrainActor.prepare, shards
        )
        calls: dict[int, Coroutine[Any, Any, Any]] = {
            **preparing,
            **self._numbered(valuing),
        }
        answers = await self._everyone.wait("prepare", calls, timeout_s)
        valued: list[CriticValues] = [
            answers[self._number_in_critic(critic.layout.reporter(replica))]
            for replica in range(critic.layout.data)
        ]
        values = reorder_values(
            shards, of_critic, [of_replica.values for of_replica in valued]
        )

        timeout_s = left_s()
        computing = self._calls_by_replica(
            self._actors, self._layout, timeout_s, TrainActor.compute_advantages, values
        )
        with_advantages = await self._everyone.wait(
            "compute_advantages", computing, timeout_s
        )
        returns = reorder_values(of_critic, shards, self._reported(with_advantages))

        timeout_s = left_s()
        learning = self._calls(
            self._all_ranks,
            timeout_s,
            TrainActor.learn,
            critic_learns_alone=valued[0].learns_alone,
        )
        learning |= self._numbered(
            self._calls_by_replica(
                critic.actors, critic.layout, timeout_s, CriticActor.learn, returns
            )
        )
        results = await self._everyone.wait("learn", learning, timeout_s)
        of_policy = self._reported(results)
        reported = [
            results[self._number_in_critic(critic.layout.reporter(replica))]
            for replica in range(critic.layout.data)
        ]
        records = batch_records(
            given, shards, [result.token_records for result in of_policy]
        )
        return replace(
            _step_result([*of_policy, *reported], results.values()),
            token_records=records,
        )

    async def evaluate(self, batch: TrainBatch) -> dict[str, Metric]:
        """Return the objective's metrics of a batch that is not trained, in which all
        samples count together. Raises TrainError, DeadlineError."""
        if self._add_samples is not None:
            batch = self._add_samples(batch)
        shards = shard_batch(batch, ranks=self._layout.data, steps=1, cost=self._cost)
        measured = await self._call_with_shards(TrainActor.evaluate, shards)
        return merge(self._reported(measured))

    async def place_text(self) -> str:
        """Return rank 0's current work, as text. A failure kills no rank. Raises
        ServerError, DeadlineError."""
        return str(await self._actors[0].call(TrainActor.place, _PLACE_TIMEOUT_S))

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        answers = await self._call_model_copy(TrainActor.logprobs, prompts)
        return answers[self._layout.reporter(0)]

    async def token_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Return log-probs of each sample's trained tokens under the current weights, 0
        elsewhere: [T] each."""
        shards = self._shards(batch)
        logprobs_by_rank = await self._call_with_shards(
            TrainActor.token_logprobs, shards
        )
        samples = [
            sample
            for shard in shards
            for mini_batch in shard
            for sample in mini_batch.samples
        ]
        by_sample = {
            id(sample): logprobs_T
            for sample, logprobs_T in zip(
                samples, chain(*self._reported(logprobs_by_rank)), strict=True
            )
        }
        return [by_sample[id(sample)] for sample in batch.samples]

    async def layout(self) -> WeightLayout:
        return await self._call_first(TrainActor.layout)

    async def stage(self, version: WeightVersion) -> StagedWeights:
        answers = await self._call_model_copy(TrainActor.stage, version)
        staged = answers[self._layout.model_copy(0)[0]]
        assert staged is not None, "the first rank of a copy collects its weights"
        return staged

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """See `Broadcaster.offer`."""
        ranks = [self._layout.model_copy(0)[0]]
        answers = await self._call(
            ranks, self._step_timeout_s, TrainActor.offer, version, engines
        )
        return answers[ranks[0]]

    async def save_checkpoint(self, path: str) -> FileEntries:
        """Save a checkpoint. The critic's separate ranks write after the policy's, into
        a folder below."""
        entries = _merged(await self._call_all(TrainActor.save_checkpoint, path))
        below = str(Path(path) / CRITIC_FOLDER)
        of_critic = await self._call_critic(CriticActor.save_checkpoint, below)
        return {**entries, **_below_critic(of_critic)}

    async def copy_model(self, path: str) -> None:
        await self._call_model_copy(TrainActor.copy_model, path)

    async def copy_checkpoint(self, path: str) -> None:
        await self._call_all(TrainActor.copy_checkpoint, path)
        await self._call_critic(
            CriticActor.copy_checkpoint, str(Path(path) / CRITIC_FOLDER)
        )

    async def model_written(self) -> FileEntries:
        return await self._call_first(TrainActor.model_written)

    async def checkpoint_written(self) -> None:
        await self._call_all(TrainActor.checkpoint_written)
        await self._call_critic(CriticActor.checkpoint_written)

    async def finish_checkpoint(self) -> FileEntries:
        entries = _merged(await self._call_all(TrainActor.finish_checkpoint))
        of_critic = await self._call_critic(CriticActor.finish_checkpoint)
        return {**entries, **_below_critic(of_critic)}

    async def load_checkpoint(self, path: str) -> None:
        await self._call_all(TrainActor.load_checkpoint, path)
        await self._call_critic(CriticActor.load_checkpoint, path)

    async def batches_trained(self) -> int:
        """Return the number of batches trained since the start, after the current
        one."""
        return await self._call_first(TrainActor.batches_trained)

    async def export_hugging_face(self, path: str) -> FileEntries:
        entries = await self._call_model_copy(TrainActor.export_hugging_face, path)
        return entries[self._layout.model_copy(0)[0]]

    def stop(self) -> None:
        self._everyone.stop()

    def _shards(self, batch: TrainBatch) -> list[Shard]:
        """Return one shard per replica."""
        return shard_batch(
            batch,
            ranks=self._layout.data,
            steps=self._num_mini_batches,
            cost=self._cost,
        )

    def _reported(self, answers: Mapping[int, Answer]) -> list[Answer]:
        """Return one result per replica: that of its reporter."""
        return [
            answers[self._layout.reporter(replica)]
            for replica in range(self._layout.data)
        ]

    @property
    def _all_ranks(self) -> Sequence[int]:
        return range(self._layout.world_size)

    @property
    def _critic_ranks(self) -> Sequence[int]:
        """Ranks within the critic. Empty if it has no separate ones."""
        return range(len(self._critic.actors)) if self._critic is not None else ()

    def _number_in_critic(self, rank: int) -> int:
        """Return the number of a rank of the critic among all."""
        return len(self._actors) + rank

    def _numbered(
        self, calls: Mapping[int, Coroutine[Any, Any, Answer]]
    ) -> dict[int, Coroutine[Any, Any, Answer]]:
        """Return calls of the critic's ranks by their numbers among all."""
        return {self._number_in_critic(rank): call for rank, call in calls.items()}

    async def _call_first(
        self,
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        """Call a method on rank 0 alone."""
        answers = await self._call([0], self._step_timeout_s, method, *args, **kwargs)
        return answers[0]

    async def _call_all(
        self,
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Answer]:
        """Call a method on every rank, with the same arguments."""
        return await self._call(
            self._all_ranks, self._step_timeout_s, method, *args, **kwargs
        )

    async def _call_model_copy(
        self,
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Answer]:
        """Call a method on the ranks that hold the first copy of the model, with the
        same arguments."""
        ranks = self._layout.model_copy(0)
        return await self._call(ranks, self._step_timeout_s, method, *args, **kwargs)

    async def _call_with_shards(
        self,
        method: Callable[[TrainActor, Shard], Awaitable[Answer]],
        shards: Sequence[Shard],
    ) -> dict[int, Answer]:
        """Call a method on every rank of the policy, with the shard of its replica."""
        timeout_s = self._step_timeout_s
        calls = self._calls_by_replica(
            self._actors, self._layout, timeout_s, method, shards
        )
        return await self._everyone.wait(method.__name__, calls, timeout_s)

    async def _call_critic(
        self,
        method: Callable[Concatenate[CriticActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Answer]:
        """Call a method on the critic's separate ranks, with the same arguments. Empty
        without such."""
        if self._critic is None:
            return {}
        timeout_s = self._step_timeout_s
        calls = self._critic_calls(
            self._critic_ranks, timeout_s, method, *args, **kwargs
        )
        return await self._everyone.wait(method.__name__, calls, timeout_s)

    async def _call(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Answer]:
        """Call a method on these ranks of the policy, with the same arguments. Results
        are by rank."""
        calls = self._calls(ranks, timeout_s, method, *args, **kwargs)
        return await self._everyone.wait(method.__name__, calls, timeout_s)

    def _calls(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        method: Callable[Concatenate[TrainActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Coroutine[Any, Any, Answer]]:
        """Make calls for `RankCalls.wait`, of ranks of the policy."""
        deadline_s = call_deadline(timeout_s)
        return {
            rank: self._actors[rank].call(method, deadline_s, *args, **kwargs)
            for rank in ranks
        }

    def _critic_calls(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        method: Callable[Concatenate[CriticActor, Parameters], Awaitable[Answer]],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> dict[int, Coroutine[Any, Any, Answer]]:
        """Make calls for `RankCalls.wait`, of ranks within the critic. Empty without
        separate ones."""
        if self._critic is None:
            return {}
        deadline_s = call_deadline(timeout_s)
        actors = self._critic.actors
        return self._numbered(
            {
                rank: actors[rank].call(method, deadline_s, *args, **kwargs)
                for rank in ranks
            }
        )

    def _calls_by_replica(
        self,
        actors: Sequence[ActorHandle[ActorT]],
        layout: ParallelLayout,
        timeout_s: float,
        method: Callable[[ActorT, Argument], Awaitable[Answer]],
        by_replica: Sequence[Argument],
    ) -> dict[int, Coroutine[Any, Any, Answer]]:
        """Make calls of all these actors, by rank, with the arguments of their
        replica."""
        deadline_s = call_deadline(timeout_s)
        calls: dict[int, Coroutine[Any, Any, Answer]] = {}
        for rank, actor in enumerate(actors):
            calls[rank] = actor.call(
                method, deadline_s, by_replica[layout.coordinates(rank).data]
            )
        return calls


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


def _below_critic(entries_by_rank: Mapping[int, FileEntries]) -> FileEntries:
    """Return the files of the critic's separate ranks, below the checkpoint's
    folder."""
    entries = _merged(entries_by_rank)
    return {f"{CRITIC_FOLDER}/{path}": entry for path, entry in entries.items()}


def _merged(entries_by_rank: Mapping[int, FileEntries]) -> FileEntries:
    """Return the files of all ranks."""
    return {
        path: entry
        for entries in entries_by_rank.values()
        for path, entry in entries.items()
    }
