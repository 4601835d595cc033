"""A trainer rank as a Ray actor: it receives calls, runs them on `TrainRank` and replies."""

import asyncio
import faulthandler
import gc
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from invrl.host.actor_heartbeat import Pulse, pulse
from invrl.host.environment_keys import forget_keys
from invrl.train.rank_settings import RankSettings
from invrl.train.rendezvous import listen


class TrainActor:
    """Runs all calls in one worker thread, one at a time, so that `beat` can answer meanwhile.

    The model is built by `start`, not by the constructor: creating the actor is quick, and all ranks exist
    before they wait for each other.
    """

    def __init__(self, settings: RankSettings) -> None:
        forget_keys()  # the policy loss may be user code
        self._settings = settings
        self._listener: socket.socket | None = None
        self._worker = ThreadPoolExecutor(1, "rank")
        faulthandler.enable(sys.stderr)

    async def beat(self) -> Pulse:
        return pulse()

    async def listen(self) -> int:
        """On rank 0: opens a free port for the ranks' common store, keeps it open and returns its number."""
        self._listener = listen(self._settings.master_addr)
        return self._listener.getsockname()[1]

    async def start(self, port: int) -> None:
        """Joins the other ranks and builds the model. `port`: the one on which rank 0 listens."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._worker, self._build, port)

    async def call(self, method: str, *arguments: object) -> object:
        """Calls a method of `TrainRank` in the worker thread."""
        bound_method = getattr(self._rank, method)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, bound_method, *arguments)

    def _build(self, port: int) -> None:
        # Garbage collection takes an eighth of the time that importing torch and Megatron needs.
        gc.disable()
        from invrl.train.rank import TrainRank

        self._rank = TrainRank(self._settings, port, self._listener)
        gc.freeze()
        gc.enable()
