"""The start of one engine of a fleet: its process here, its agent on another node, or
the address of one that others start; the client with its keys, and its receiver of
weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.client.weight_receiver import EngineReceiver
from invrl.engines.client.weight_receivers import RECEIVERS
from invrl.engines.config import EngineConfig
from invrl.engines.inside_sglang.engine_traces import FLAG
from invrl.engines.launch.engine_agent_actor import EngineStart
from invrl.engines.launch.engine_hosts import EngineHosts
from invrl.engines.launch.engine_server import (
    ENGINE_MODULE,
    EngineServer,
    count_gpus,
    max_total_tokens,
)
from invrl.engines.launch.external_engine import ExternalEngine, wanted_traits
from invrl.engines.launch.hosted_engine import HostedEngine
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.engines.launch.sglang_args import flags_of_run
from invrl.host.output.log_lines import LogSettings
from invrl.host.processes.fork_parent import ForkParent
from invrl.weights.config import AnyWeights, ArenaWeights


@dataclass(slots=True, kw_only=True)
class Engine:
    """One engine of the fleet: its process, agent or address, its client with the keys,
    and its receiver."""

    server: EngineServer | ExternalEngine | HostedEngine
    client: SglangClient
    receiver: EngineReceiver


class EngineOptions(TypedDict, total=False):
    """What the engines of a fleet have in addition to the settings of [engine]."""

    sglang: Mapping[str, object]
    """Options that pass through, by upstream's field names."""
    weights: AnyWeights
    adapter: ServedAdapter | None
    """The adapter of the transport `adapter`, or those of `invrl serve --adapter`."""
    record_experts: bool
    """Keep which experts computed each token."""
    external_key: str
    """Key of external engines."""
    traces_endpoint: str
    """Receiver of the spans of engines that start here; "": they send none."""
    log: LogSettings | None
    """Log of engines that start here; None for the defaults."""
    shares_gpus: bool
    """GPUs are used in turns with the trainer; engines then start one after the
    other."""
    by_priority: bool
    """Sample requests with a larger priority first."""
    gpus: Sequence[Sequence[int]]
    """GPUs of each engine that starts here; empty: engines are on the CPU."""
    hosts: EngineHosts | None
    """Other nodes, on which the fleet's own engines start; None: they start here."""
    parent: ForkParent | None
    """The process that forks the engines, and is its owner's to stop; None for one of
    the fleet's own, where engines can be forked."""


class EngineLauncher:
    """Launches engines by name, each as often as it is asked to. All have the same
    settings."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        run_folder: Path,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Starts the process that forks engines, unless `parent` does. Raises
        ConfigError."""
        weights = options.get("weights") or ArenaWeights.model_validate({})
        record_experts = options.get("record_experts", False)
        self._config = config
        self._model_path = model_path
        self._run_folder = run_folder
        self._weights = weights
        self._external_key = options.get("external_key", "")
        self._log = options.get("log")
        self._hosts = options.get("hosts")
        self._gpus: dict[str, Sequence[int]] = {}
        gpus = options.get("gpus", ())
        if gpus:
            self._gpus = dict(zip(self._own_names, gpus, strict=True))
        in_place = weights.inflight == "in_place"
        self.sglang_flags = flags_of_run(
            options.get("sglang") or {},
            in_place=in_place,
            record_experts=record_experts,
            traces_endpoint=options.get("traces_endpoint", ""),
            shares_gpu=options.get("shares_gpus", False) and count_gpus() > 0,
            by_priority=options.get("by_priority", False),
        )
        adapter = options.get("adapter")
        if adapter is not None:
            self.sglang_flags += adapter.flags(on_cpu=not count_gpus())
        self._traits = wanted_traits(
            config, model_path, in_place=in_place, record_experts=record_experts
        )
        self.external_urls = {
            f"external-{index}": url.rstrip("/")
            for index, url in enumerate(config.external_engines)
        }
        """URLs of the external engines, by name."""
        self.limits = EngineLimits.of(
            model_path, max_total_tokens=max_total_tokens(config)
        )
        self.own_parent: ForkParent | None = None
        """The process that forks the engines, if it is to end together with them."""
        self.parent = self._find_parent(options.get("parent"))
        """The process that forks the engines; None if they cannot be forked."""

    def _find_parent(self, given: ForkParent | None) -> ForkParent | None:
        """Return the process that forks the engines, or None: on a GPU
        (`host/processes/fork_parent.py`), or if spans are sent, whose exporter is
        chosen before SGLang is imported."""
        if not self._config.num_engines or self._hosts is not None:
            return None
        if count_gpus() or FLAG in self.sglang_flags:
            return None
        if given is not None:
            return given
        log_file = self._run_folder / "logs" / "engine-parent.log"
        self.own_parent = ForkParent(ENGINE_MODULE, log=log_file)
        return self.own_parent

    @property
    def names(self) -> list[str]:
        """Names of all engines of the fleet."""
        return [*self._own_names, *self.external_urls]

    @property
    def _own_names(self) -> list[str]:
        """Names of the engines that the fleet starts."""
        return [f"engine-{index}" for index in range(self._config.num_engines)]

    def launch(self, name: str, *, api_key: str | None) -> Engine:
        """Start an engine's process, in this thread: the kernel ends it together with
        the thread. An engine on another node starts once it is waited for, and the name
        of an external one starts nothing. `api_key`: the one that the engine must have;
        None: a random one."""
        server: EngineServer | ExternalEngine | HostedEngine
        if name in self.external_urls:
            server = ExternalEngine(
                name,
                self.external_urls[name],
                key=self._external_key,
                traits=self._traits,
                total_tokens=max_total_tokens(self._config),
                start_timeout_s=self._config.start_timeout_s,
            )
        elif self._hosts is not None:
            start = EngineStart(
                name=name,
                config=self._config,
                model_path=self._model_path,
                run_folder=self._run_folder,
                passthrough=self.sglang_flags,
                api_key=api_key,
                log=self._log,
            )
            server = HostedEngine(start, self._hosts)
        else:
            server = EngineServer(
                name,
                self._config,
                model_path=self._model_path,
                run_folder=self._run_folder,
                passthrough=[*self.sglang_flags, *self._gpu_flags(name)],
                api_key=api_key,
                index=self._own_names.index(name),
                log=self._log,
                parent=self.parent,
            )
        client = SglangClient(
            server.url,
            limits=self.limits,
            api_key=server.api_key,
            admin_key=server.admin_key,
            name=name,
        )
        receiver = RECEIVERS[self._weights.transport](
            name, client, self._weights, num_ranks=self._config.tp_size
        )
        is_elsewhere = name in self.external_urls or self._hosts is not None
        receiver.replies_over_http = is_elsewhere
        return Engine(server=server, client=client, receiver=receiver)

    def _gpu_flags(self, name: str) -> list[str]:
        """Return the flags for an engine's GPUs, which follow each other. It sees all
        GPUs, so that it can open the trainer's memory."""
        gpus = self._gpus.get(name)
        return ["--base-gpu-id", str(gpus[0])] if gpus else []
