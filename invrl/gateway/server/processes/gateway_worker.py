"""One worker of the gateway: it serves the application on inherited sockets.

The supervisor forks it. Threads, the event loop and the store exist only from `serve`
on.
"""

import asyncio
import gc
import signal
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import SecretStr

from invrl.engines.client.routed_experts import ExpertsShape
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.server.http.http_protocol import limited_http_protocol
from invrl.gateway.server.processes.heartbeat_page import (
    WorkerHeartbeats,
    beat_interval_s,
)
from invrl.gateway.server.routes.app import make_app
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.output.log_lines import write_log_lines
from invrl.host.output.traces import open_traces
from invrl.store.run_store_writer import RunStoreWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineClients:
    """Clients of the engines behind each router."""

    fleet: SglangClient
    evaluation: SglangClient | None
    """Client of the engines that are set aside for evaluation."""

    @staticmethod
    def of(settings: GatewaySettings, heartbeats: WorkerHeartbeats) -> "_EngineClients":
        make_client = partial(_engine_client, settings, heartbeats)
        evaluation = None
        if settings.eval_router_url is not None:
            evaluation = make_client(
                settings.eval_router_url,
                settings.eval_router_api_key,
                name="the engines for evaluation",
            )
        return _EngineClients(
            fleet=make_client(
                settings.router_url, settings.router_api_key, name="the fleet"
            ),
            evaluation=evaluation,
        )

    async def close(self) -> None:
        await self.fleet.close()
        if self.evaluation is not None:
            await self.evaluation.close()


def serve(
    settings: GatewaySettings,
    renderer: Renderer,
    parsers: Parsers,
    place: WorkerPlace,
    sockets: list[socket.socket],
    heartbeats: WorkerHeartbeats,
) -> None:
    """Run until SIGTERM, which the caller has blocked. On return, every accepted turn
    is committed."""
    write_log_lines(f"gateway-worker-{place.number}", settings.log)
    # uvicorn raises the signal that ended it once more, for the handler that was there
    # before its own. (With SIG_IGN the kernel would discard a signal that arrived while
    # it was blocked.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    store = RunStoreWriter(
        Path(settings.store_path), heartbeat_timeout_s=settings.heartbeat_timeout_s
    )
    clients = _EngineClients.of(settings, heartbeats)
    traces = open_traces(
        settings.otel_endpoint, service="invrl-gateway", run=settings.run_id
    )

    async def run() -> None:
        beating = asyncio.create_task(_beat_forever(heartbeats, settings))
        app = make_app(
            settings,
            sampler=clients.fleet,
            eval_sampler=clients.evaluation,
            renderer=renderer,
            parsers=parsers,
            store=store,
            place=place,
            traces=traces,
            on_shutdown=clients.close,
            ending=lambda: server.should_exit,
            run_ended=heartbeats.page.run_has_ended,
            read_fleet=heartbeats.page.fleet,
            note_held_turns=heartbeats.note_held_turns,
        )
        server = uvicorn.Server(_server_config(app, settings))
        await _serve_until_sigterm(server, sockets)
        beating.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    store.close()
    if traces is not None:
        traces.close()


async def _beat_forever(
    heartbeats: WorkerHeartbeats, settings: GatewaySettings
) -> None:
    while True:
        heartbeats.beat()
        await asyncio.sleep(beat_interval_s(settings.heartbeat_timeout_s))


def _server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    http_protocol = limited_http_protocol(
        head_timeout_s=settings.head_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )
    return uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        log_config=None,  # its records go where ours go
        timeout_graceful_shutdown=3,
        timeout_keep_alive=75,
        proxy_headers=False,
        http=http_protocol,
        backlog=4096,
    )


async def _serve_until_sigterm(
    server: uvicorn.Server, sockets: list[socket.socket]
) -> None:
    # uvicorn sets its handler before its first await; SIGTERM is unblocked right
    # after that.
    loop = asyncio.get_running_loop()
    loop.call_soon(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
    gc.freeze()  # what is loaded stays: collecting it again stopped every stream for 0.2 s
    # Sessions are freed by reference count; a search for cycles in all of them
    # stopped every stream for 60 ms.
    gc.set_threshold(5000, 3, 1000)
    await server.serve(sockets)


def _engine_client(
    settings: GatewaySettings,
    heartbeats: WorkerHeartbeats,
    router_url: str,
    router_api_key: SecretStr | None,
    *,
    name: str,
) -> SglangClient:
    """Return the client of the engines behind a router."""
    api_key = ""
    if router_api_key is not None:
        api_key = router_api_key.get_secret_value()
    experts = ExpertsShape.of(settings.model_path) if settings.record_experts else None
    return SglangClient(
        router_url,
        limits=EngineLimits(
            vocab_size=settings.vocab_size, context_length=settings.context_length
        ),
        api_key=api_key,
        name=name,
        generate_deadline_s=settings.session.generate_timeout_s,
        experts=experts,
        newest_version=heartbeats.page.newest_version,
        on_wrong_reply=heartbeats.count_wrong_reply,
    )
