"""Common parts of policy and critic ranks as Ray actors: one worker thread, a
concurrent heartbeat, and checkpoints."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, Generic, ParamSpec, TypeVar

from invrl.host.gpus import VISIBLE_VARIABLE
from invrl.host.network.rendezvous import listen
from invrl.host.processes.environment_keys import forget_keys
from invrl.host.ray.actor_heartbeat import Pulse, pulse
from invrl.host.ray.actor_output import begin_output
from invrl.train.rank_settings import RankSettings
from invrl.train.ranks.saving_rank import SavingRank
from invrl.types.file_entry import FileEntries

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


RankT = TypeVar("RankT", bound=SavingRank)


class RankActor(ABC, Generic[RankT]):
    """Runs its calls in one worker thread, one at a time, so that `beat` can answer
    meanwhile.

    `start` builds the model, not the constructor: creating the actor is quick, and all
    ranks exist before they wait for each other.
    """

    role: ClassVar[str]
    """Name of this group's ranks in logs."""

    def __init__(self, settings: RankSettings) -> None:
        forget_keys()  # the policy loss may be user code
        if settings.visible_gpus is not None:
            # CUDA reads it when it is first used, which is later.
            os.environ[VISIBLE_VARIABLE] = settings.visible_gpus
        self._settings = settings
        self._listener: socket.socket | None = None
        self._worker = ThreadPoolExecutor(1, "rank")
        self._rank: RankT
        faulthandler.enable(sys.stderr)

    @abstractmethod
    def _make(self, port: int) -> RankT:
        """Make the rank, which joins the others."""

    async def beat(self) -> Pulse:
        return pulse()

    async def listen(self) -> int:
        """Open a free port for the ranks' common store, keep it open and return its
        number. On rank 0."""
        self._listener = listen(self._settings.master_addr)
        return self._listener.getsockname()[1]

    async def start(self, port: int) -> Pulse:
        """Join the other ranks and build the model. Rank 0 listens on `port`. Returns
        which process this is."""
        if self._settings.log is not None:
            begin_output(f"{self.role}-rank-{self._settings.rank}", self._settings.log)
        await self._in_worker(self._build, port)
        return pulse()

    async def save_checkpoint(self, path: str) -> FileEntries:
        return await self._in_worker(self._rank.save_checkpoint, path)

    async def copy_checkpoint(self, path: str) -> None:
        await self._in_worker(self._rank.copy_checkpoint, path)

    async def checkpoint_written(self) -> None:
        """Wait for what `copy_checkpoint` began, while the worker trains."""
        await asyncio.wrap_future(self._rank.state_written)

    async def finish_checkpoint(self) -> FileEntries:
        return await self._in_worker(self._rank.finish_checkpoint)

    async def load_checkpoint(self, path: str) -> None:
        await self._in_worker(self._rank.load_checkpoint, path)

    async def _in_worker(
        self,
        work: Callable[Parameters, Answer],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, partial(work, *args, **kwargs))

    def _build(self, port: int) -> None:
        # Garbage collection takes an eighth of the time that importing torch and
        # Megatron needs.
        gc.disable()
        self._rank = self._make(port)
        gc.freeze()
        gc.enable()
