"""A trainer rank as a Ray actor: it receives calls, runs them on `TrainRank` and replies."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from invrl.file_entry import FileEntries
from invrl.host.actor_heartbeat import Pulse, pulse
from invrl.host.environment_keys import forget_keys
from invrl.host.rendezvous import listen
from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.metrics import Metric
from invrl.train.rank_settings import RankSettings
from invrl.train.sharding import Shard
from invrl.types import WeightVersion

if TYPE_CHECKING:
    from invrl.train.rank import TrainRank

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


class TrainActor:
    """Runs all calls but `offer` in one worker thread, one at a time, so that `beat` can answer meanwhile.

    The model is built by `start`, not by the constructor: creating the actor is quick, and all ranks exist
    before they wait for each other. The other methods are those of `TrainRank`.
    """

    def __init__(self, settings: RankSettings) -> None:
        forget_keys()  # the policy loss may be user code
        self._settings = settings
        self._listener: socket.socket | None = None
        self._worker = ThreadPoolExecutor(1, "rank")
        self._rank: TrainRank
        faulthandler.enable(sys.stderr)

    async def beat(self) -> Pulse:
        return pulse()

    async def listen(self) -> int:
        """On rank 0: opens a free port for the ranks' common store, keeps it open and returns its number."""
        self._listener = listen(self._settings.master_addr)
        return self._listener.getsockname()[1]

    async def start(self, port: int) -> Pulse:
        """Joins the other ranks and builds the model. `port`: the one on which rank 0 listens. Returns which
        process this is."""
        await self._in_worker(self._build, port)
        return pulse()

    async def train(self, shard: Shard) -> StepResult:
        return await self._in_worker(self._rank.train, shard)

    async def evaluate(self, shard: Shard) -> dict[str, Metric]:
        return await self._in_worker(self._rank.evaluate, shard)

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        return await self._in_worker(self._rank.logprobs, prompts)

    async def token_logprobs(self, shard: Shard) -> list[NDArray[np.float32]]:
        return await self._in_worker(self._rank.token_logprobs, shard)

    async def layout(self) -> WeightLayout:
        return await self._in_worker(self._rank.layout)

    async def stage(self, version: WeightVersion) -> StagedWeights | None:
        return await self._in_worker(self._rank.stage, version)

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """Beside what the worker does, which may be a training step."""
        return self._rank.offer(version, engines)

    async def save_checkpoint(self, path: str) -> FileEntries:
        return await self._in_worker(self._rank.save_checkpoint, path)

    async def copy_model(self, path: str) -> None:
        await self._in_worker(self._rank.copy_model, path)

    async def copy_checkpoint(self, path: str) -> None:
        await self._in_worker(self._rank.copy_checkpoint, path)

    async def model_written(self) -> FileEntries:
        """Waits for what `copy_model` began, while the worker trains."""
        return await asyncio.wrap_future(self._rank.model_written)

    async def checkpoint_written(self) -> None:
        """Waits for what `copy_checkpoint` began, while the worker trains."""
        await asyncio.wrap_future(self._rank.state_written)

    async def finish_checkpoint(self) -> FileEntries:
        return await self._in_worker(self._rank.finish_checkpoint)

    async def load_checkpoint(self, path: str) -> None:
        await self._in_worker(self._rank.load_checkpoint, path)

    async def batches_trained(self) -> int:
        return await self._in_worker(self._rank.batches_trained)

    async def export_hugging_face(self, path: str) -> FileEntries:
        return await self._in_worker(self._rank.export_hugging_face, path)

    async def _in_worker(
        self, work: Callable[Parameters, Answer], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, partial(work, *args, **kwargs))

    def _build(self, port: int) -> None:
        # Garbage collection takes an eighth of the time that importing torch and Megatron needs.
        gc.disable()
        from invrl.train.rank import TrainRank

        self._rank = TrainRank(self._settings, port, self._listener)
        gc.freeze()
        gc.enable()
