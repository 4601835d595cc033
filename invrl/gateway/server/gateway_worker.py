"""One worker of the gateway: the application on the sockets that it inherited. Forked by `run/supervisor.py`;
threads, event loop and store exist only from here on."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
import uvloop

from invrl.engines.sglang_client import EngineLimits, SglangClient
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.parsers import Parsers
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.app import make_app
from invrl.gateway.server.heartbeat_page import beat_interval_s
from invrl.gateway.server.http_protocol import corked_http
from invrl.gateway.server.settings import GatewaySettings
from invrl.store.run_store_writer import RunStoreWriter


def serve(
    settings: GatewaySettings,
    renderer: Renderer,
    parsers: Parsers,
    place: WorkerPlace,
    sockets: list[socket.socket],
    *,
    beat: Callable[[], None],
    run_ended: Callable[[], bool],
) -> None:
    """Runs until SIGTERM (blocked by who calls, awaited from here on); every accepted turn is committed when
    this returns. `beat` is called again and again, as long as the event loop runs. `run_ended`: whether
    outside environments are to be told so."""
    # uvicorn raises the signal that ended it once more, for the handler that was there before its own. (With
    # SIG_IGN the kernel would forget one that came while it was blocked.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    store = RunStoreWriter(Path(settings.store_path), heartbeat_timeout_s=settings.heartbeat_timeout_s)
    engine = SglangClient(
        settings.router_url,
        limits=EngineLimits(vocab_size=settings.vocab_size, context_length=settings.context_length),
        api_key=settings.router_api_key.get_secret_value() if settings.router_api_key else "",
        name="the fleet",
        generate_deadline_s=settings.generate_timeout_s,
    )

    async def beat_forever() -> None:
        while True:
            beat()
            await asyncio.sleep(beat_interval_s(settings.heartbeat_timeout_s))

    async def run() -> None:
        beating = asyncio.create_task(beat_forever())
        config = uvicorn.Config(
            make_app(
                settings,
                engine=engine,
                renderer=renderer,
                parsers=parsers,
                store=store,
                place=place,
                on_shutdown=engine.close,
                ending=lambda: server.should_exit,
                run_ended=run_ended,
            ),
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=3,
            timeout_keep_alive=75,
            proxy_headers=False,
            http=corked_http(
                head_timeout_s=settings.head_timeout_s, write_timeout_s=settings.write_timeout_s
            ),
            backlog=4096,
        )
        server = uvicorn.Server(config)
        # Once uvicorn has its handler, which it sets before its first await.
        unblock = signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM}
        asyncio.get_running_loop().call_soon(*unblock)
        gc.freeze()  # what is loaded stays: going through it again stopped every stream for 0.2 s
        # Sessions die by reference count; a look at all of them for cycles stopped every stream for 60 ms.
        gc.set_threshold(5000, 3, 1000)
        await server.serve(sockets)
        beating.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    store.close()
