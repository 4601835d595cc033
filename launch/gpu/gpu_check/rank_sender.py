"""A trainer of one rank as the sender of weight updates: it trains a step between two
of them.

Torch remembers some of its settings for each thread, so one thread of its own has the
rank from its start. Imports torch when it is imported.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.training.workloads import make_batch
from invrl.algorithms.config import AlgorithmConfig
from invrl.families.hf_config import read_hf_config
from invrl.host.network.rendezvous import listen
from invrl.host.processes.process import random_key
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.weights import WeightVersion
from invrl.weights.transports.buckets import (
    GPU_BUCKET_BYTES,
    BucketSender,
    bucket_names,
)

P = ParamSpec("P")
T = TypeVar("T")

_LR = 3e-4
"""Large enough that a step changes most numbers in bfloat16, which has three digits."""
_ROW_TOKENS = 128
_ROWS = 16


class RankSender:
    """A `WeightSender`. `start` comes first, and `close` at the end."""

    def __init__(self) -> None:
        self.staged: StagedWeights | None = None
        self.changed_tensors: list[int] = []
        """How many tensors each version has that differ from those of the version
        before."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank")
        self._buckets: BucketSender | None = None

    async def start(self, model: Path, *, arena_on_gpu: bool) -> None:
        train = TrainConfig.model_validate(
            {"lr": _LR, "max_tokens_per_micro_batch": _ROWS * _ROW_TOKENS}
        )
        settings = RankSettings(
            rank=0,
            layout=ParallelLayout(),
            master_addr="127.0.0.1",
            store_key=random_key(),
            model_path=str(model),
            train=train,
            algorithm=AlgorithmConfig.model_validate({}),
            weight_dtype=train.train_dtype,
            arena_on_gpu=arena_on_gpu,
        )
        batch = make_batch(
            "equal_lengths",
            num_tokens=_ROWS * _ROW_TOKENS,
            longest=_ROW_TOKENS,
            vocab_size=read_hf_config(model).vocab_size,
        )
        [self._shard] = shard_batch(batch, ranks=1, steps=1)
        listener = listen(settings.master_addr)
        self._rank = await self._call(
            TrainRank, settings, listener.getsockname()[1], listener
        )

    def close(self) -> None:
        self._thread.shutdown()

    async def use_transport(self, transport: Literal["arena", "bucket"]) -> None:
        self._buckets = (
            await self._call(self._bucket_sender) if transport == "bucket" else None
        )

    def holds(self, version: WeightVersion) -> bool:
        return self.staged is not None and self.staged.version == version

    async def bucket(self, index: int, copies: int) -> list[str]:
        return await self._call(self._bucket, index, copies)

    async def change(self) -> None:
        """Train a step."""
        await self._call(self._rank.train, self._shard)

    async def checksums(self) -> Mapping[str, str]:
        """Of what was sent last."""
        assert self.staged is not None, "nothing was sent"
        return self.staged.checksums

    async def layout(self) -> WeightLayout:
        return self._rank.layout()

    async def stage(self, version: WeightVersion) -> StagedWeights:
        staged = await self._call(self._stage, version)
        if self.staged is not None:
            before = self.staged.checksums
            changed = sum(
                before[name] != checksum for name, checksum in staged.checksums.items()
            )
            self.changed_tensors.append(changed)
        self.staged = staged
        return staged

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return await self._call(self._rank.logprobs, prompts)

    def _bucket_sender(self) -> BucketSender:
        device = torch.device("cuda") if torch.cuda.is_available() else None
        return BucketSender(
            self._rank.layout(), bucket_bytes=GPU_BUCKET_BYTES, device=device
        )

    def _bucket(self, index: int, copies: int) -> list[str]:
        assert self._buckets is not None, "the transport is another one"
        names = bucket_names(self._rank.layout(), GPU_BUCKET_BYTES)[index]
        weights = self._rank._weights.export(self._rank._served_dtype, names=names)
        return self._buckets.bucket(index, weights, copies)

    def _stage(self, version: WeightVersion) -> StagedWeights:
        if self._buckets is not None:
            weights = self._rank._weights.export(self._rank._served_dtype)
            return self._buckets.stage(version, weights)
        staged = self._rank.stage(version)
        assert staged is not None, "the only rank has all of the weights"
        return staged

    async def _call(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
