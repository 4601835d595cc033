"""The processes of a run, in the order in which they start, and their end.

    join_ray                  only with RAY_ADDRESS (`run/hosts/placement.py`)
    start_cluster             for `invrl train`
      start_serving           for `invrl serve` too (`run/processes/serving.py`)
        1. guardian           outlives a killed driver, and ends what is left
        2. engines, router    OS processes (`engines/fleet/fleet.py`)
        3. gateway            an OS process, which forks its workers
      start_ray               (`run/processes/ray_session.py`)
        4. trainer ranks      Ray actors
        5. buffer             a Ray actor
        6. rollout workers    Ray actors (`rollout/workers/worker_pool.py`)
      7. environment        an OS process (`run/processes/environment_program.py`)

Start-up overlaps: engines load while Ray starts and the trainer ranks load; with
`--colocate` they load once the trainer sleeps. On return, on an error and on Ctrl-C
everything ends in reverse order. After kill -9 of the driver the kernel
(PR_SET_PDEATHSIG), Ray and the guardian end it.

Processes that die in a run are replaced by their owners: the fleet starts engines and
the router, the gateway its supervisor and workers, the worker pool rollout workers.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from invrl.algorithms.objectives.mismatched_samples import with_mismatched_samples
from invrl.algorithms.objectives.objectives import objective_needs
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.engines.launch.engine_server import count_gpus, smallest_gpu_bytes
from invrl.host.gpus import own_gpu_first
from invrl.host.output.wait_lines import print_waits
from invrl.host.processes.guardian import start_guardian
from invrl.host.processes.interrupts import CleanUp
from invrl.host.processes.process import random_key
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.rollout.dispatch.external_environments import ExternalDispatcher
from invrl.rollout.dispatch.rollout_handle import RolloutHandle
from invrl.rollout.tasks.tasks import load_tasks
from invrl.rollout.workers.session_client import SessionClient
from invrl.run.hosts.cluster_check import check_cluster
from invrl.run.hosts.placement import LOOPBACK, Placement, WorkerNodes, engine_pool
from invrl.run.processes.environment_program import EnvironmentProgram
from invrl.run.processes.gpu_plan import (
    GpuPlan,
    plan_run,
    plan_trainer,
)
from invrl.run.processes.phase_progress import StartingParts
from invrl.run.processes.ray_session import start_ray
from invrl.run.processes.serving import Serving, start_serving
from invrl.run.processes.tokenizer import chat_template_override
from invrl.run.processes.trainer_memory import with_divided_memory
from invrl.run.processes.weight_devices import arena_on_gpu, broadcast_on_gpu
from invrl.run.settings.config import Config
from invrl.run.settings.served_adapters import adapters_by_name, served_adapter
from invrl.store.lease_store import LeaseStore
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.train.cost.model_size import ComputeCost
from invrl.train.critic.critic_actor import CriticActor
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks.rank_group import RankGroup
from invrl.train.trainer.train_actor import TrainActor
from invrl.train.trainer.train_handle import TrainHandle
from invrl.weights.config import FileWeights

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All processes of a training run, ready."""

    serving: Serving
    trainer: TrainHandle | None
    """None with `--debug-rollout-only`."""
    buffer: BufferHandle
    rollouts: RolloutHandle
    environment: EnvironmentProgram | None = None
    """The environment that the run starts, if any."""

    def end_external_environments(self) -> None:
        """Tell external environments, if the run has any, that the run is over."""
        if self.serving.settings.leases:
            self.serving.gateway.end_run()

    async def guard(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. If rollouts, gateway, fleet, buffer, trainer or
        environment fail first, raise their error."""
        guarded = self.rollouts.guard(work)
        guarded = first_to_fail(guarded, self.serving.watch())
        guarded = first_to_fail(guarded, self.buffer.watch())
        if self.trainer is not None:
            guarded = first_to_fail(guarded, self.trainer.watch())
        if self.environment is not None:
            guarded = first_to_fail(guarded, self.environment.watch())
        return await guarded


@asynccontextmanager
async def start_cluster(
    config: Config,
    folder: RunFolder,
    snapshot: bytes | None,
    starting: StartingParts | None = None,
) -> AsyncIterator[Cluster]:
    """Start everything that a training run needs, and end it on exit. `snapshot`: the
    buffer's, from the checkpoint that the run resumes from. `starting` records the
    parts that are not up yet. Raises InvrlError naming what failed."""
    starting = starting or StartingParts()
    trainer_sleeps = asyncio.Event() if config.run.colocate else None
    gpus = plan_run(config, count_gpus())
    config = with_divided_memory(config, gpus, gpu_bytes=smallest_gpu_bytes())
    async with CleanUp() as stack:
        placement = await join_ray(config, folder, starting, stack)
        serving = await stack.enter_async_context(
            start_serving(
                config,
                folder,
                longest_row=config.train.max_sample_tokens,
                engines_may_start=trainer_sleeps,
                gpus=gpus,
                hosts=engine_pool(config, placement),
                adapter=served_adapter(config) or adapters_by_name(config),
            )
        )
        with print_waits(starting.awaited):
            if placement is None:
                with starting.part("Ray"):
                    stack.enter_context(start_ray(config, folder.ray_logs_path))
            trainer = None
            if not config.run.debug_rollout_only:
                weight_folder = _weight_folder(config, folder)
                stack.callback(shutil.rmtree, weight_folder, ignore_errors=True)
                trainer = _create_trainer(config, folder, gpus, placement)
            buffer = _create_buffer(config, folder)
            rollouts = create_rollouts(config, folder, serving, buffer, placement)
            stack.push_async_callback(rollouts.stop)
            starts = [
                starting.wait_until_up("engines", serving.wait_ready()),
                starting.wait_until_up("buffer", buffer.start(snapshot)),
                starting.wait_until_up("rollout workers", rollouts.start()),
            ]
            if trainer is not None:
                stack.callback(trainer.stop)
                start = _start_trainer(trainer, trainer_sleeps)
                starts.append(starting.wait_until_up("trainer", start))
            await all_started(*starts)
        environment = None
        if config.rollout.environment is not None:
            environment = EnvironmentProgram(
                config.rollout.environment,
                serving,
                folder,
                concurrency=config.rollout.first_concurrency,
            )
            stack.callback(environment.stop)
        cluster = Cluster(
            serving=serving,
            trainer=trainer,
            buffer=buffer,
            rollouts=rollouts,
            environment=environment,
        )
        try:
            yield cluster
        except BaseException as error:
            interrupted = isinstance(error, asyncio.CancelledError)
            # After a failure the next incarnation may continue, and environments are to
            # ask again.
            if interrupted or not config.run.max_restarts:
                cluster.end_external_environments()
            raise


@asynccontextmanager
async def start_trainer(
    config: Config, folder: RunFolder, starting: StartingParts | None = None
) -> AsyncIterator[TrainHandle]:
    """Start only the trainer, and end it on exit. SGLang need not be installed.
    `starting` records that it is not up yet."""
    starting = starting or StartingParts()
    async with CleanUp() as stack:
        start_guardian()
        placement = await join_ray(config, folder, starting, stack)
        with print_waits(starting.awaited):
            if placement is None:
                with starting.part("Ray"):
                    stack.enter_context(start_ray(config, folder.ray_logs_path))
            gpus = plan_trainer(config, count_gpus())
            trainer = _create_trainer(config, folder, gpus, placement)
            stack.callback(trainer.stop)
            await starting.wait_until_up("trainer", trainer.start())
        yield trainer


async def join_ray(
    config: Config, folder: RunFolder, starting: StartingParts, stack: AsyncExitStack
) -> Placement | None:
    """Join the Ray that RAY_ADDRESS names, until `stack` ends, and check the nodes that
    the run uses, before anything else starts. None: there is none, and the run's own
    Ray starts beside its other processes. Raises ConfigError."""
    if os.environ.get("RAY_ADDRESS"):
        with print_waits(starting.awaited), starting.part("Ray"):
            stack.enter_context(start_ray(config, folder.ray_logs_path))
            return await check_cluster(config, folder.path)
    return await check_cluster(config, folder.path)


async def _start_trainer(trainer: TrainHandle, sleeps: asyncio.Event | None) -> None:
    """Start the trainer. `sleeps`: set when the trainer sleeps, if engines share its
    GPUs. Engines take the memory that is free when they start."""
    await trainer.start()
    if sleeps is not None:
        await trainer.sleep()
        sleeps.set()


async def all_started(*starts: Awaitable[None]) -> None:
    """Await all concurrently. The first failure cancels the others, and is raised once
    they have ended."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _weight_folder(config: Config, folder: RunFolder) -> Path:
    """Return the run's own weight folder, for the transports that write files."""
    weights = config.weights
    if not isinstance(weights, FileWeights) or not weights.folder:
        return folder.weights_path
    return Path(weights.folder).absolute() / f"weights-of-{folder.path.name}"


def _create_trainer(
    config: Config,
    folder: RunFolder,
    gpus: GpuPlan | None,
    placement: Placement | None,
) -> TrainHandle:
    """Create one actor per rank, each on its GPU of the plan, or on its node;
    `TrainHandle.start` makes them join."""
    layout = config.train.layout
    options = _rank_options(config, placement)
    visible: list[str | None] = [None] * config.num_ranks
    if gpus is not None and gpus.ranks:
        count = count_gpus()
        visible = [own_gpu_first(gpu, count, os.environ) for gpu in gpus.ranks]

    def settings_of(layout: ParallelLayout, first: int) -> list[RankSettings]:
        address = LOOPBACK if placement is None else placement.rank_address(first)
        return _rank_settings(
            config, folder, layout, visible[first:], gpus=gpus, address=address
        )

    actors = [
        start_actor(f"trainer rank {rank.rank}", TrainActor, options[rank.rank], rank)
        for rank in settings_of(layout, 0)
    ]
    critic = None
    critic_layout = config.critic_layout
    if critic_layout is not None:
        first = layout.world_size
        critic_actors = [
            start_actor(
                f"critic rank {rank.rank}",
                CriticActor,
                options[first + rank.rank],
                rank,
            )
            for rank in settings_of(critic_layout, first)
        ]
        critic = RankGroup(actors=critic_actors, layout=critic_layout)
    add_samples = None
    if objective_needs(config.algorithm).mismatched_samples:
        add_samples = partial(
            with_mismatched_samples, max_tokens=config.train.max_sample_tokens or 0
        )
    return TrainHandle(
        actors,
        layout=layout,
        critic=critic,
        num_mini_batches=config.algorithm.num_mini_batches,
        cost=ComputeCost.of_model(config.model.folder),
        add_samples=add_samples,
        start_timeout_s=config.train.train_start_timeout_s,
        step_timeout_s=config.train.train_step_timeout_s,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
    )


def _rank_options(config: Config, placement: Placement | None) -> list[ActorOptions]:
    """Return the node of each rank, the policy's before the critic's. On other nodes
    Ray gives each its GPU."""
    if placement is None or placement.ranks is None:
        return [ActorOptions()] * config.num_ranks
    return [
        ActorOptions(node=node.id, num_gpus=1 if node.gpus else None)
        for node in placement.ranks
    ]


def _rank_settings(
    config: Config,
    folder: RunFolder,
    layout: ParallelLayout,
    visible: Sequence[str | None],
    *,
    gpus: GpuPlan | None,
    address: str,
) -> list[RankSettings]:
    """Return the settings of one group's ranks, in their order. `visible` begins with
    what CUDA_VISIBLE_DEVICES shows each of them. `address`: where they meet."""
    host_threads = 1
    if gpus is not None and gpus.ranks:
        host_threads = gpus.cores_per_rank(len(os.sched_getaffinity(0)))
    first = RankSettings(
        rank=0,
        layout=layout,
        master_addr=address,
        store_key=random_key(),
        model_path=str(config.model.folder),
        reference_path=str(config.model.reference_folder),
        teacher_path=str(config.teacher_folder or ""),
        critic_path=str(config.critic_folder),
        chat_template=chat_template_override(config),
        train=config.train,
        algorithm=config.algorithm,
        weight_dtype=config.engine.dtype,
        weights=config.weights,
        host_threads=host_threads,
        arena_on_gpu=arena_on_gpu(
            config, gpus=count_gpus(), gpu_bytes=smallest_gpu_bytes()
        ),
        broadcast_on_gpu=broadcast_on_gpu(config, gpus),
        engine_ranks=config.engine.tp_size,
        weight_folder=str(_weight_folder(config, folder)),
        base_checksum_path=str(folder.base_checksum_path),
        megatron=dict(config.megatron),
        seed=config.run.seed,
        log=config.run.log_settings(folder.path.name),
    )
    return [
        replace(first, rank=rank, visible_gpus=visible[rank])
        for rank in range(layout.world_size)
    ]


def _create_buffer(config: Config, folder: RunFolder) -> BufferHandle:
    actor = start_actor(
        "the buffer",
        BufferActor,
        ActorOptions(max_concurrency=64),
        config.buffer,
        config.rollout,
        tasks_factory=partial(load_tasks, config.rollout, "train", config.run.seed),
        run_store_path=folder.store_path,
        trains_all_roots=config.gateway.session.train_auxiliary_roots,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
        log=config.run.log_settings(folder.path.name),
    )
    return BufferHandle(
        actor=actor,
        batch_timeout_s=config.buffer.batch_timeout_s,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
        folder=folder.path,
    )


def create_rollouts(
    config: Config,
    folder: RunFolder,
    serving: Serving,
    buffer: BufferHandle | None = None,
    placement: Placement | None = None,
) -> RolloutHandle:
    """Create the rollout workers and the dispatcher. Without a buffer they only
    evaluate."""
    gate = config.gateway.gate
    gateway_url = serving.gateway.url
    worker_nodes = None
    if placement is not None and placement.worker_pool is not None:
        gateway_url = serving.gateway.url_at(placement.driver.address)
        worker_nodes = WorkerNodes(placement.worker_pool)
    external_dispatcher = None
    if buffer is not None and config.rollout.external_environments:
        store_path = Path(serving.settings.store_path)
        external_dispatcher = ExternalDispatcher(
            buffer,
            LeaseStore(store_path, heartbeat_timeout_s=config.run.heartbeat_timeout_s),
            RunStore(store_path),
            SessionClient(gateway_url, env_key=serving.env_key),
            timeout_s=config.gateway.session.lease_timeout_s,
        )
    return RolloutHandle(
        config.rollout,
        buffer=buffer,
        external_dispatcher=external_dispatcher,
        gateway_url=gateway_url,
        next_node=worker_nodes.next_node if worker_nodes else lambda: None,
        env_key=serving.env_key,
        model=serving.settings.model_name,
        read_fleet=lambda: structs.replace(
            serving.fleet.load.serving(evaluation=False),
            held_turns=serving.gateway.held_turns,
        ),
        max_hold_s=None if gate is None else gate.max_hold_s,
        seed=config.run.seed,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
        logs=folder.logs_path,
        log=config.run.log_settings(folder.path.name),
    )
