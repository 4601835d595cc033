"""Engines behind a router behind a gateway: the rollout half of a run, without user
code.

`invrl serve` has only these processes; a training run starts the others next to them
(`cluster.py`)."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass

from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_hosts import EngineHosts
from invrl.engines.launch.engine_server import count_gpus
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import ReservedPort
from invrl.host.output.traces import traces_endpoint
from invrl.host.processes.environment_keys import take_engine_key, take_environment_key
from invrl.host.processes.guardian import start_guardian
from invrl.host.processes.interrupts import CleanUp
from invrl.run.processes.gpu_plan import GpuPlan, plan_engines
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder

_GATEWAY_START_TIMEOUT_S = 120.0
_WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The engines, their routers and the gateway, and the start of the engines."""

    fleet: Fleet
    gateway: GatewayServer
    settings: GatewaySettings
    fleet_start: asyncio.Task[None]

    @property
    def env_key(self) -> str:
        return self.settings.env_key.get_secret_value()

    async def wait_ready(self) -> None:
        """Wait until the engines are healthy and router and gateway answer. The router
        sends no request to an engine before `Fleet.admit`."""
        await self.fleet_start
        await asyncio.to_thread(
            self.gateway.wait_ready, deadline_s=_GATEWAY_START_TIMEOUT_S
        )

    async def watch(self) -> None:
        """Watch until cancelled. Raises ServerError when no engine is left and none may
        come back, when the router cannot be replaced, or when the gateway has died too
        often in a short time."""
        wrong_replies = self.gateway.wrong_replies
        while True:
            self.gateway.check_alive()
            self.fleet.check()
            self.gateway.announce_load(self.fleet.load)
            if self.gateway.wrong_replies > wrong_replies:
                wrong_replies = self.gateway.wrong_replies
                self.fleet.examine(self.gateway.newest_version)
            await asyncio.sleep(_WATCH_INTERVAL_S)


@asynccontextmanager
async def start_serving(
    config: Config,
    folder: RunFolder,
    *,
    longest_row: int | None = None,
    engines_may_start: asyncio.Event | None = None,
    gpus: GpuPlan | None = None,
    hosts: EngineHosts | None = None,
    adapter: ServedAdapter | None = None,
) -> AsyncIterator[Serving]:
    """Start engines, router and gateway without waiting for them; end them on exit.
    `longest_row`: a request that would make a longer conversation is refused as
    exceeding the model's context. `engines_may_start`: engines start once it is set;
    None: immediately. `gpus`: the plan of a run that trains; None: the engines have all
    GPUs. Raises ConfigError if there are too few. `hosts`: nodes of the Ray that this
    process has joined, for the engines; None: they start here. `adapter`: the one that
    the run's trainer sends alone, or those that clients choose; None: engines serve
    whole weights."""
    gpus = gpus or plan_engines(config, count_gpus())
    env_key = take_environment_key()
    engine_key = take_engine_key()
    async with CleanUp() as stack:
        start_guardian()
        fleet = Fleet(
            config.engine,
            model_path=config.model.folder,
            run_folder=folder.path,
            sglang=config.sglang,
            router=config.router,
            weights=config.weights,
            adapter=adapter,
            heartbeat_timeout_s=config.run.heartbeat_timeout_s,
            record_experts=config.train.records_experts,
            external_key=engine_key,
            traces_endpoint=traces_endpoint(config.run.log.otel_endpoint),
            log=config.run.log_settings(folder.path.name),
            shares_gpus=bool(config.run.colocate),
            eval_engines=config.rollout.eval.engines or 0,
            by_priority=config.uses_priority_scheduling,
            gpus=gpus.engines if gpus else (),
            hosts=hosts,
        )
        stack.push_async_callback(fleet.stop)
        fleet_start = asyncio.create_task(_start_engines(fleet, engines_may_start))
        stack.push_async_callback(_cancel_and_wait, fleet_start)
        # The fleet starts its processes now. They load while the caller starts others.
        await asyncio.sleep(0)
        with closing(ReservedPort()) as reserved:  # until the gateway listens there
            settings = _gateway_settings(
                config,
                folder,
                fleet,
                longest_row=longest_row,
                free_port=reserved.number,
                env_key=env_key,
            )
            gateway = GatewayServer(
                settings,
                folder=folder.path / "private",
                log=folder.log_path("gateway"),
                parent=fleet.fork_parent,
            )
        stack.callback(gateway.stop)
        stack.push_async_callback(gateway.wait_end_grace)
        yield Serving(
            fleet=fleet, gateway=gateway, settings=settings, fleet_start=fleet_start
        )


async def _start_engines(fleet: Fleet, may_start: asyncio.Event | None) -> None:
    """Start the engines. The task that sets the event has a deadline, or fails and ends
    this wait."""
    if may_start is not None:
        await may_start.wait()
    await fleet.start()


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel the task, and wait until it has ended, with or without an error."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _gateway_settings(
    config: Config,
    folder: RunFolder,
    fleet: Fleet,
    *,
    longest_row: int | None,
    free_port: int,
    env_key: str,
) -> GatewaySettings:
    """`free_port`: used if the settings name no port. `env_key`: the user's; "" makes a
    random one."""
    context_length = fleet.limits.context_length
    if longest_row is not None:
        context_length = min(context_length, longest_row)
    sampling_seed = None
    if config.engine.seeded_sampling:
        sampling_seed = config.run.seed
    model_name, *model_aliases = config.model.names
    eval_router = {}
    if fleet.eval_router is not None:
        eval_router = {
            "eval_router_url": fleet.eval_router.url,
            "eval_router_api_key": fleet.eval_router.api_key,
        }
    values = {
        **eval_router,
        **config.rollout.model_dump(include={"temperature", "max_new_tokens"}),
        **config.gateway.model_dump(),
        **asdict(fleet.limits),
        "context_length": context_length,
        "run_id": folder.path.name,
        "otel_endpoint": config.run.log.otel_endpoint or "",
        "log": config.run.log_settings(folder.path.name),
        "incarnation": secrets.token_hex(8),
        "heartbeat_timeout_s": config.run.heartbeat_timeout_s,
        "engine_return_s": config.engine.start_timeout_s + config.weights.timeout_s,
        "port": config.gateway.port or free_port,
        "router_url": fleet.router.url,
        "router_api_key": fleet.router.api_key,
        "priority_scheduling": config.uses_priority_scheduling,
        "env_key": env_key or f"env-{secrets.token_urlsafe(24)}",
        "model_path": str(config.model.folder),
        "model_name": model_name,
        "model_aliases": model_aliases,
        "adapters": tuple(config.model.adapters),
        "store_path": str(folder.store_path),
        "leases": config.rollout.external_environments,
        "sampling_seed": sampling_seed,
        "record_experts": config.train.records_experts,
        # More than the vocabulary has would kill an engine.
        "record_top_logprobs": min(
            config.rollout.rollout_top_logprobs or 0, fleet.limits.vocab_size
        ),
    }
    return GatewaySettings.model_validate(values)
