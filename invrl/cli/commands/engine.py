"""`invrl engine`: one standalone engine, which other runs use
(`engines/launch/external_engine.py`).

It serves until Ctrl-C, TERM, or its own death; then all of its processes have ended.
After kill -9 of this process the kernel and the guardian end them.
"""

import asyncio
import ipaddress
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from invrl.cli.arguments import read_whole, split_options
from invrl.cli.command import CommandFailed
from invrl.cli.run_process import checked_configuration
from invrl.engines.fleet.engine_health import Clock, until_ended
from invrl.engines.launch.engine_server import EnginePlace, EngineServer
from invrl.engines.launch.sglang_args import flags_of_run
from invrl.errors import ConfigError, InvrlError, ServerError
from invrl.host.files.temporary_folder import remove_abandoned
from invrl.host.output.traces import traces_endpoint
from invrl.host.processes import interrupts
from invrl.host.processes.environment_keys import ENGINE_KEY, take_engine_key
from invrl.host.processes.guardian import start_guardian
from invrl.run.processes.driver_commands import FAILURE_EXIT
from invrl.run.settings.config import Config

_OWN_FLAGS = ("--host", "--port", "--log-folder")
_KEY = re.compile(r"[A-Za-z0-9_.+/=][A-Za-z0-9_.+/=-]{15,}")
_KEY_FIX = f"export {ENGINE_KEY}=$(openssl rand -hex 24), here and where the run starts"
_HIGHEST_PORT = 65_535
_LOOK_INTERVAL_S = 0.25


def engine(arguments: Sequence[str]) -> None:
    """usage: invrl engine --model-path FOLDER [--host ADDRESS] [--port N] [flags]

    Starts one engine, which runs on this or another machine use by --external-engines
    URL. It serves until Ctrl-C, and its weights are those of the last run that used it.
    Give it the flags below as the run has them.

    flags of its own:
      --host ADDRESS      where it listens (default: 127.0.0.1); 0.0.0.0: on every interface. Without
                          TLS: use it in a private network
      --port N            default: 30000; 0: a free one
      --log-folder PATH   where logs/engine-N.log is written (default: the current folder)

    environment:
      INVRL_ENGINE_KEY    the key of the engine: 16 or more random characters. The run has the same

    example:
      export INVRL_ENGINE_KEY=$(openssl rand -hex 24)
      invrl engine --model-path MODEL --port 30000"""
    key = take_engine_key()
    options, settings = split_options(arguments, _OWN_FLAGS)
    place = EnginePlace(
        host=_read_host(options.get("--host", "127.0.0.1")),
        port=read_whole(
            "--port",
            options.get("--port", "30000"),
            reason="not a port",
            fix=f"give a number from 0 to {_HIGHEST_PORT}",
            most=_HIGHEST_PORT,
        ),
        key=check_key(key),
    )
    config = checked_configuration(settings, command="engine")
    folder = Path(options.get("--log-folder", ".")).expanduser().absolute()
    interrupts.catch()
    try:
        interrupts.run(serve_engine(config, place, folder))
    except ConfigError:
        raise
    except InvrlError as error:
        print(f"invrl: the engine failed: {error}", file=sys.stderr)
        raise CommandFailed(FAILURE_EXIT) from error


async def serve_engine(config: Config, place: EnginePlace, folder: Path) -> None:
    """Serve until cancelled. The log is below `folder`. Raises ConfigError for a port
    that is in use, ServerError or DeadlineError if the engine does not start, and
    ServerError when it dies."""
    remove_abandoned()
    in_place = config.weights.inflight == "in_place"
    flags = flags_of_run(
        config.sglang,
        in_place=in_place,
        record_experts=config.train.records_experts,
        traces_endpoint=traces_endpoint(config.run.log.otel_endpoint),
    )
    async with interrupts.CleanUp() as stack:
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


def check_key(key: str) -> str:
    """Return the key. Raises ConfigError unless an engine can have it."""
    if not key:
        reason = "it is missing, and an engine answers nobody without a key"
        raise ConfigError(ENGINE_KEY, "", reason, _KEY_FIX)
    if not _KEY.fullmatch(key):
        reason = "it needs 16 or more characters, of letters, digits and _ . + / = -"
        raise ConfigError(ENGINE_KEY, "(not shown)", reason, _KEY_FIX)
    return key


def _read_host(text: str) -> str:
    reason = "not an IPv4 address"
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        address = None
        reason = "not an IP address"
    if address is None or address.version != 4:
        fix = "give an IPv4 address of this machine"
        raise ConfigError("--host", text, reason, fix)
    return text
