"""Creates every process of a run, and ends them: Ray, trainer ranks, buffer, workers, engines, router,
gateway. Start-up overlaps: engines load while Ray starts and the
trainer ranks load. Everything is ended in reverse order on return, error and Ctrl-C; on kill -9 by the
kernel (PR_SET_PDEATHSIG), by Ray and by the guardian."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from invrl.buffer.buffer_actor import BufferActor
from invrl.buffer.buffer_handle import BufferHandle
from invrl.engines.engine_server import count_gpus
from invrl.engines.fleet import Fleet
from invrl.errors import ServerError
from invrl.gateway.server.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host import lifeline
from invrl.host.actor_heartbeat import remote_with_beat
from invrl.host.environment_keys import RAY_TOKEN, key_in_environment, take_environment_key
from invrl.host.guardian import start_guardian
from invrl.host.interrupts import CleanUp
from invrl.host.ports import ReservedPort
from invrl.host.process import random_key
from invrl.host.ray_setup import ray_folder, worker_environment
from invrl.host.ray_watch import end_this_process, watched_ray
from invrl.rollout.dispatcher import first_to_fail
from invrl.rollout.external_environments import LeaseOffers
from invrl.rollout.rollout_handle import RolloutHandle
from invrl.rollout.session_client import SessionClient
from invrl.rollout.tasks import load_tasks
from invrl.run.config import Config
from invrl.store.lease_store import LeaseStore
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.train.rank_settings import RankSettings
from invrl.train.train_actor import TrainActor
from invrl.train.train_handle import TrainHandle

T = TypeVar("T")
_GATEWAY_START_S = 120.0
_WATCH_EVERY_S = 1.0
_RAY_END_S = 60.0
_SURE_TO_FAIL_AGAIN = (ValueError, TypeError, ImportError, PermissionError)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The rollout half without user code: a fleet behind a router behind a gateway."""

    fleet: Fleet
    gateway: GatewayServer
    settings: GatewaySettings
    started: asyncio.Task[None]

    @property
    def env_key(self) -> str:
        return self.settings.env_key.get_secret_value()

    async def wait_ready(self) -> None:
        """Engines healthy, router and gateway answering; no engine is routable yet (`Fleet.admit`)."""
        await self.started
        await asyncio.to_thread(self.gateway.wait_ready, deadline_s=_GATEWAY_START_S)

    async def watch(self) -> None:
        """Never returns; raises ServerError once the router or the last engine is gone, or a gateway that was
        started again and again."""
        while True:
            self.gateway.check_alive()
            self.fleet.check()
            await asyncio.sleep(_WATCH_EVERY_S)


@asynccontextmanager
async def start_serving(config: Config, folder: RunFolder) -> AsyncIterator[Serving]:
    """Starts engines, router and gateway without waiting for them; ends them on exit."""
    env_key = take_environment_key()
    async with CleanUp() as stack:
        start_guardian()
        fleet = Fleet(
            config.engine,
            model_path=config.model.folder,
            run_folder=folder.path,
            sglang=config.sglang,
            router=config.router,
            transport=config.weight_sync.weight_transport,
            heartbeat_timeout_s=config.run.heartbeat_timeout_s,
            weight_sync_timeout_s=config.weight_sync.weight_sync_timeout_s,
        )
        stack.push_async_callback(fleet.stop)
        started = asyncio.create_task(fleet.start())
        stack.push_async_callback(_cancelled, started)
        await asyncio.sleep(0)  # its processes exist now and load while the caller starts others
        with closing(ReservedPort()) as reserved:  # until the gateway listens there
            settings = _gateway_settings(config, folder, fleet, free_port=reserved.number, env_key=env_key)
            gateway = GatewayServer(settings, folder=folder.path / "private", log=folder.log_path("gateway"))
        stack.callback(gateway.stop)
        stack.push_async_callback(gateway.tell_the_end)
        yield Serving(fleet=fleet, gateway=gateway, settings=settings, started=started)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Returns once it has ended, however it did."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def all_started(*starts: Awaitable[None]) -> None:
    """Awaits all at once. The first failure cancels the others, and is raised once they have ended."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _gateway_settings(
    config: Config, folder: RunFolder, fleet: Fleet, *, free_port: int, env_key: str
) -> GatewaySettings:
    """`free_port`: for a gateway that was given none. `env_key`: the user's; "" for one of our own."""
    values = {
        **config.rollout.model_dump(include={"temperature", "max_new_tokens"}),
        **config.gateway.model_dump(),
        **asdict(fleet.limits),
        "run_id": folder.path.name,
        "incarnation": secrets.token_hex(8),
        "heartbeat_timeout_s": config.run.heartbeat_timeout_s,
        "gateway_port": config.gateway.gateway_port or free_port,
        "router_url": fleet.router.url,
        "router_api_key": fleet.router.api_key,
        "env_key": env_key or f"env-{secrets.token_urlsafe(24)}",
        "model_path": str(config.model.folder),
        "model_name": config.model.name,
        "store_path": str(folder.store_path),
        "leases": config.rollout.external_environments,
        "sampling_seed": config.run.seed if config.engine.seeded_sampling else None,
    }
    return GatewaySettings.model_validate(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Both halves, alive; no trainer in a run that only rolls out."""

    serving: Serving
    trainer: TrainHandle | None
    buffer: BufferHandle
    rollouts: RolloutHandle

    def end_outside(self) -> None:
        """Tells environments that we do not start, if the run has any, that it is over."""
        if self.serving.settings.leases:
            self.serving.gateway.end_run()

    async def guard(self, work: Awaitable[T]) -> T:
        """`work`'s result, or the failure of whatever else the run is made of if that comes first."""
        guarded = first_to_fail(self.rollouts.guard(work), self.serving.watch())
        guarded = first_to_fail(guarded, self.buffer.watch())
        return await (guarded if self.trainer is None else first_to_fail(guarded, self.trainer.watch()))


@asynccontextmanager
async def start_cluster(config: Config, folder: RunFolder, snapshot: bytes | None) -> AsyncIterator[Cluster]:
    """Everything a training run needs, ready; ended on exit. `snapshot`: the buffer of the checkpoint that
    the run goes on from. Raises InvrlError naming what failed."""
    async with CleanUp() as stack:
        serving = await stack.enter_async_context(start_serving(config, folder))
        stack.enter_context(start_ray(config, folder.ray_logs_path))
        trainer = None if config.run.debug_rollout_only else _make_trainer(config)
        buffer = _make_buffer(config, folder)
        rollouts = make_rollouts(config, folder, serving, buffer)
        stack.push_async_callback(rollouts.stop)
        starts = [buffer.start(snapshot), rollouts.start(), serving.wait_ready()]
        if trainer is not None:
            stack.callback(trainer.stop)
            starts.append(trainer.start())
        await all_started(*starts)
        cluster = Cluster(serving=serving, trainer=trainer, buffer=buffer, rollouts=rollouts)
        try:
            yield cluster
        except BaseException as error:
            # After a failure the next incarnation may go on, and environments are to ask again.
            if isinstance(error, asyncio.CancelledError) or not config.run.max_restarts:
                cluster.end_outside()
            raise


def make_rollouts(
    config: Config, folder: RunFolder, serving: Serving, buffer: BufferHandle | None = None
) -> RolloutHandle:
    """Workers and what gives them rollouts; without a buffer it only evaluates."""
    offers = None
    if buffer is not None and config.rollout.external_environments:
        path = Path(serving.settings.store_path)
        offers = LeaseOffers(
            buffer,
            LeaseStore(path, heartbeat_timeout_s=config.run.heartbeat_timeout_s),
            RunStore(path),
            SessionClient(serving.gateway.url, env_key=serving.env_key),
            timeout_s=config.gateway.lease_timeout_s,
        )
    return RolloutHandle(
        config.rollout,
        buffer=buffer,
        offers=offers,
        gateway_url=serving.gateway.url,
        env_key=serving.env_key,
        model=serving.settings.model_name,
        seed=config.run.seed,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
        logs=folder.logs_path,
    )


@asynccontextmanager
async def start_trainer(config: Config, folder: RunFolder) -> AsyncIterator[TrainHandle]:
    """The trainer alone, ready; needs no sglang on the machine."""
    with ExitStack() as stack:
        start_guardian()
        stack.enter_context(start_ray(config, folder.ray_logs_path))
        trainer = _make_trainer(config)
        stack.callback(trainer.stop)
        await trainer.start()
        yield trainer


@contextmanager
def start_ray(config: Config, logs: Path) -> Iterator[None]:
    """A local Ray behind a token (`host/ray_setup.py`), or the one that RAY_ADDRESS names; no other is looked
    for, such as one whose address an earlier program left in a file. One of our own is started again where it
    does not come up, `run.ray_start_attempts` times in all. Raises ServerError; then nothing of it is left.

    TERM is the command line's: Ray's C++ sets a handler over it, and the default before it ends its
    processes."""
    elsewhere = bool(os.environ.get("RAY_ADDRESS"))
    # Processes of a Ray of our own inherit the environment; an agent that sets it costs seconds.
    runtime_env = {"env_vars": worker_environment()} if elsewhere else None
    take_back = partial(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    inside: Any = vars(ray)["_private"]
    inside.utils.set_sigterm_handler = lambda _: None  # its own ends the process from within our loop
    os.register_at_fork(after_in_child=os.setpgrp)  # a signal to our group is not for Ray's processes
    with ExitStack() as stack:
        try:
            if elsewhere:
                _init_ray(runtime_env=runtime_env)
            else:
                stack.enter_context(_ray_of_our_own(logs, config.run.ray_start_attempts))
        finally:
            take_back()
        stack.callback(_shut_ray_down)
        if (node := inside.worker._global_node) is not None:  # as for an address ray://...
            end = node.kill_all_processes  # takes seconds
            node.kill_all_processes = lambda **how: (take_back(), end(**how))
        if not elsewhere:
            client = inside.worker.global_worker.gcs_client
            stack.enter_context(watched_ray(node, client, heartbeat_timeout_s=config.run.heartbeat_timeout_s))
        yield


@contextmanager
def _ray_of_our_own(logs: Path, attempts: int) -> Iterator[None]:
    """A local Ray, and the folder that it is started in. Ray waits 30 s for its raylet, whatever it is told,
    and a busy machine may take longer: so a start that failed is tried again, in another folder."""
    for attempt in range(1, attempts + 1):
        with ExitStack() as stack:
            folder = stack.enter_context(ray_folder(logs))
            try:
                _init_ray(address="local", _temp_dir=folder)
            except ServerError as error:
                _end_processes_naming(folder)
                if attempt == attempts or isinstance(error.__cause__, _SURE_TO_FAIL_AGAIN):
                    raise
                logger.warning("%s", error, exc_info=True)
                print(
                    f"warning: {error}; it is started again (start {attempt + 1} of {attempts})", flush=True
                )
                continue
            yield
            return


def _init_ray(**own: Any) -> None:
    """`ray.init` with these arguments of its own. Raises ServerError, with what Ray raised as its cause."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        # Ray reads its token once, so that it need not stay in the environment.
        with lifeline.blocked("the start of Ray"), key_in_environment(RAY_TOKEN):
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **own,
            )
    except Exception as error:
        where = f"the one at RAY_ADDRESS={address}" if address else "one of our own"
        failure = f"Ray ({where}) did not start: {_first_sentences(error)}"
        _shut_ray_down(after=f"{failure}; and ")  # half of it may have started
        raise ServerError(failure) from error


def _first_sentences(error: Exception) -> str:
    """What Ray says, without the logs that it may append."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _end_processes_naming(folder: str) -> None:
    """Ray forgets the processes of a start that failed. Each of them has its folder on its command line."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(folder in argument for argument in process.cmdline()):
                process.kill()


def _shut_ray_down(after: str = "") -> None:
    """`ray.shutdown` waits for minutes where a process of Ray's does not answer: that has a deadline here,
    which ends this process with the cause, begun by `after`."""
    late = f"{after}Ray did not end within {_RAY_END_S:g} s"
    timer = threading.Timer(_RAY_END_S, end_this_process, [late])
    timer.daemon = True
    timer.start()
    ray.shutdown()
    timer.cancel()


def _make_trainer(config: Config) -> TrainHandle:
    """One actor per rank; `TrainHandle.start` makes them join."""
    settings = partial(
        RankSettings,
        world_size=config.train.data_parallel_size,
        master_addr="127.0.0.1",  # all ranks are on this machine so far
        store_key=random_key(),
        model_path=str(config.model.folder),
        chat_template=_given_template(config),
        train=config.train,
        algorithm=config.algorithm,
        weight_dtype=config.engine.engine_dtype,
        transport=config.weight_sync.weight_transport,
        megatron=dict(config.megatron),
        seed=config.run.seed,
    )
    actor: Any = remote_with_beat(TrainActor).options(num_cpus=0, num_gpus=min(1, count_gpus()))
    return TrainHandle(
        [actor.remote(settings(rank=rank)) for rank in range(config.train.data_parallel_size)],
        num_minibatches=config.algorithm.num_minibatches,
        start_timeout_s=config.train.train_start_timeout_s,
        step_timeout_s=config.train.train_step_timeout_s,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
    )


def _given_template(config: Config) -> str:
    """The chat template that the run uses in place of the model's own; "" for none."""
    if not config.gateway.chat_template_path:
        return ""
    from invrl.gateway.rendering.chat_template import chat_template_source  # loads the tokenizers' library

    return chat_template_source("", config.gateway.chat_template_path)


def _make_buffer(config: Config, folder: RunFolder) -> BufferHandle:
    made: Any = remote_with_beat(BufferActor).options(num_cpus=0, max_concurrency=64)
    actor = made.remote(
        config.buffer,
        config.rollout,
        tasks_factory=partial(load_tasks, config.rollout, "train", config.run.seed),
        run_store_path=folder.store_path,
        trains_all_roots=config.gateway.train_auxiliary_roots,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
    )
    return BufferHandle(
        actor=actor,
        batch_timeout_s=config.buffer.batch_timeout_s,
        heartbeat_timeout_s=config.run.heartbeat_timeout_s,
    )
