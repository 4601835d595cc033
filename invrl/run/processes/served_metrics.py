"""The metrics of a run for Prometheus, from the start of its driver to its end
(`metrics.port`).

Invariant: metrics end no run. Wrong settings are found before the start (`cli/checks`);
a port that is taken later is reported, and the run continues without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from invrl import __version__
from invrl.errors import DeadlineError, ServerError
from invrl.observe.metrics.metrics_server import PATH, MetricsServer
from invrl.observe.metrics.run_exporter import Numbers, RunExporter, Source
from invrl.observe.sinks.sinks import Sink
from invrl.run.processes import metrics_sources as sources
from invrl.run.processes.process_samples import process_memory
from invrl.store.metrics_file import read_metrics

if TYPE_CHECKING:
    from invrl.buffer.process.buffer_handle import BufferHandle
    from invrl.run.processes.serving import Serving
    from invrl.run.settings.config import Config
    from invrl.store.run_folder import RunFolder
    from invrl.train.trainer.train_handle import TrainHandle

logger = logging.getLogger(__name__)
_BUFFER_INTERVAL_S = 2.0


class ServedMetrics:
    """Metrics server of a run; serves nothing if the settings give no port.
    `num_steps`: 0 for a command that makes no steps."""

    def __init__(
        self, config: Config, folder: RunFolder, command: str, *, num_steps: int = 0
    ) -> None:
        self.message = ""
        """Console message with the metrics' address, or the reason that there are none;
        empty without a port."""
        self._exporter: RunExporter | None = None
        self._server: MetricsServer | None = None
        self._serving: Serving | None = None
        self._trainer: TrainHandle | None = None
        run = config.run
        if not run.metrics.port:
            return
        fixed: dict[str, Mapping[tuple[str, ...], float]] = {
            "invrl_run_info": {(folder.path.name, command, __version__): 1.0},
            "invrl_driver_start_timestamp_seconds": {(): time.time()},
        }
        if num_steps:
            fixed["invrl_steps_wanted"] = {(): float(num_steps)}
            fixed["invrl_staleness_bound"] = {(): float(config.buffer.max_staleness)}
        exporter = RunExporter(fixed)
        exporter.recall(read_metrics(folder.metrics_path))
        exporter.attach(
            {
                "disk": partial(sources.disk_numbers, folder),
                "checkpoints": partial(sources.checkpoint_numbers, folder),
                "processes": self._memory,
            }
        )
        try:
            self._server = MetricsServer(
                exporter,
                host=run.metrics.host,
                port=run.metrics.port,
                upstreams=self._upstreams,
            )
        except OSError as error:
            logger.warning("metrics are not served: %r", error)
            place = f"{run.metrics.host}:{run.metrics.port}"
            self.message = (
                f"warning: metrics are not served at {place}: {error.strerror or error}"
            )
            return
        self._exporter = exporter
        host = f"[{run.metrics.host}]" if ":" in run.metrics.host else run.metrics.host
        self.message = f"metrics: http://{host}:{run.metrics.port}{PATH}"

    def sinks(self) -> list[Sink]:
        """Sinks of the run's observer."""
        return [] if self._exporter is None else [self._exporter]

    @contextmanager
    def of_serving(
        self, serving: Serving, trainer: TrainHandle | None = None
    ) -> Iterator[None]:
        """Show engines, router and gateway within the block too, and the trainer's
        ranks by name."""
        if self._exporter is None:
            yield
            return
        read = partial(sources.read_gateway, serving.gateway.url, serving.env_key)
        parts: dict[str, Source] = {
            "engines": partial(sources.fleet_numbers, serving.fleet.state),
            "gateway": lambda: sources.gateway_numbers(read()),
        }
        self._serving = serving
        self._trainer = trainer
        self._exporter.attach(parts)
        try:
            yield
        finally:
            self._exporter.detach(parts)
            self._serving = None
            self._trainer = None

    async def watch_buffer(self, buffer: BufferHandle, *, resumed: bool) -> None:
        """Poll the buffer's counts every 2 s until cancelled, so that scrapes do not
        have to. Returns if the buffer has died: the loop's own call then raises the
        cause."""
        if self._exporter is None:
            return
        numbers = sources.BufferNumbers(resumed)
        self._exporter.attach({"buffer": numbers.numbers})
        while True:
            try:
                numbers.update(await buffer.counts())
            except DeadlineError as error:
                # it is busy; the next query may succeed
                logger.warning("metrics: the buffer did not answer: %s", error)
            except ServerError as error:
                logger.warning("metrics: the buffer is not asked any more: %s", error)
                self._exporter.detach(["buffer"])
                return
            await asyncio.sleep(_BUFFER_INTERVAL_S)

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.stop()
            self._server = None

    def _memory(self) -> Numbers:
        return sources.memory_numbers(process_memory(self._serving, self._trainer))

    def _upstreams(self) -> Mapping[str, str]:
        """Return the addresses of the routers' and the engines' own metrics."""
        serving = self._serving
        if serving is None:
            return {}
        fleet = serving.fleet.state()
        engines = {name: f"{url}/metrics/" for name, url in fleet.alive.items()}
        return {**fleet.router_metrics, **engines}
