"""`invrl engine`: one standalone engine, which other runs use
(`engines/external_engine.py`).

It serves until Ctrl-C, TERM, or its own death; then all of its processes have ended.
After kill -9 of this process the kernel and the guardian end them.
"""

import asyncio
from pathlib import Path

from invrl.engines.engine_health import Clock, until_ended
from invrl.engines.engine_server import EnginePlace, EngineServer
from invrl.engines.sglang_args import flags_of_run
from invrl.errors import ConfigError, ServerError
from invrl.host.guardian import start_guardian
from invrl.host.interrupts import CleanUp
from invrl.host.temporary_folder import remove_abandoned
from invrl.host.traces import traces_endpoint
from invrl.run.config import Config

_LOOK_INTERVAL_S = 0.25


async def serve_engine(config: Config, place: EnginePlace, folder: Path) -> None:
    """Serve until cancelled. The log is below `folder`. Raises ConfigError for a port
    that is in use, ServerError or DeadlineError if the engine does not start, and
    ServerError when it dies."""
    remove_abandoned()
    in_place = config.weight_sync.weight_update_inflight == "in_place"
    flags = flags_of_run(
        config.sglang,
        in_place=in_place,
        record_experts=config.train.records_experts,
        traces_endpoint=traces_endpoint(config.run.otel_endpoint),
    )
    async with CleanUp() as stack:
        start_guardian()
        try:
            server = EngineServer(
                f"engine-{place.port}" if place.port else "engine",
                config.engine,
                model_path=config.model.folder,
                run_folder=folder,
                passthrough=flags,
                place=place,
                log=config.run.log_settings(""),
            )
        except OSError as error:
            fix = "choose another port, or 0 for a free one"
            raise ConfigError(
                "--port", place.port, f"it is in use ({error.strerror})", fix
            ) from error
        stack.callback(server.stop)
        print(
            f"starting an engine with {config.model.folder}; log: {server.log}",
            flush=True,
        )
        await asyncio.to_thread(server.wait_ready)
        print(f"the engine is ready: {server.url}\nCtrl-C ends it", flush=True)
        await until_ended(
            server.processes(), interval_s=_LOOK_INTERVAL_S, clock=Clock()
        )
        raise ServerError(
            f"a process of the engine has ended. Last lines of {server.log}:\n{server.log_tail()}"
        )
