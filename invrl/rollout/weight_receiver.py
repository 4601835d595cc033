"""One engine's side of a weight update: what the transaction calls, put into SGLang's terms.

Invariant: names, shapes and dtypes are checked inside the engine before a byte moves (it would die of
a wrong shape and silently accept an unknown name), checksums are read back from the parameters that
serve, and the version is named only by `commit`. `ArenaReceiver` has the engine copy from the
trainer's shared memory; `BucketReceiver` uses SGLang's own flattened buckets. Built by `fleet`,
driven by `weight_sync`; the loader inside the engine is `weight_loader`."""

from __future__ import annotations

import base64
import json
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import DeadlineError, LayoutError, ServerError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.rollout.engine_server import WEIGHT_LOADER
from invrl.rollout.sglang_client import SglangClient
from invrl.rollout.weight_loader import LoaderOp, LoaderReply, LoaderRequest, read_reply
from invrl.types import TensorSpec, WeightVersion
from invrl.weight_arena import ArenaHandle, open_arena


class EngineReceiver(ABC):
    """What every carrier shares; a carrier is `load`."""

    def __init__(
        self, name: str, client: SglangClient, *, reply_folder: Path, deadline_s: float = 300.0
    ) -> None:
        self.name, self._client = name, client
        self._reply_folder, self._deadline_s = reply_folder, deadline_s
        self._approved: tuple[TensorSpec, ...] | None = None
        self.is_paused = False
        """For the health check: a paused engine makes no token."""

    async def check(self, layout: tuple[TensorSpec, ...], staged: StagedWeights) -> None:
        """LayoutError unless the layout is exactly the engine's weights. The engine is asked once per
        layout: outside a pause it answers only when no request runs, and nothing about it changes."""
        if set(staged.checksums) != {spec.name for spec in layout}:
            raise LayoutError("what was staged is not what the layout names", engine=self.name)
        if layout != self._approved:
            async with self._update():
                await self._ask("check", tensors=layout)
            self._approved = layout

    async def pause(self) -> None:
        self.is_paused = True
        with _as_weight_sync(self.name):
            await self._client.pause()
            await self._client.flush_cache()

    @abstractmethod
    async def load(self, staged: StagedWeights) -> None: ...

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        if self._approved is None:
            raise WeightSyncError("checksums before check", engine=self.name)
        async with self._update():
            reply = await self._ask("digest", tensors=self._approved)
        return reply.checksums

    async def commit(self, version: WeightVersion) -> None:
        with _as_weight_sync(self.name):
            await self._client.set_weight_version(version)
            named = await self._client.weight_version()
            if named != str(version):
                raise WeightSyncError(f"calls itself version {named}, not {version}", engine=self.name)

    async def resume(self) -> None:
        with _as_weight_sync(self.name):
            await self._client.resume()
        self.is_paused = False

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        with _as_weight_sync(self.name):
            return await self._client.prompt_logprobs(prompts, deadline_s=self._deadline_s)

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[None]:
        """SGLang takes weights only between these two calls."""
        with _as_weight_sync(self.name):
            await self._client.begin_weight_update()
            try:
                yield
            finally:
                await self._client.end_weight_update()

    async def _ask(self, op: LoaderOp, *, tensors: Sequence[TensorSpec] = (), arena: str = "") -> LoaderReply:
        """One operation of the loader inside the engine, within `_update`."""
        import torch

        self._reply_folder.mkdir(parents=True, exist_ok=True)
        path = str(self._reply_folder / f"{self.name}-{secrets.token_hex(8)}.reply")
        request = LoaderRequest(op=op, reply_path=path, tensors=tuple(tensors), arena=arena)
        # The name of an empty tensor carries the request.
        named = pickle.dumps([(msgspec.json.encode(request).decode(), torch.empty(0))])
        await self._send(base64.b64encode(named).decode(), WEIGHT_LOADER)
        return read_reply(path)

    async def _send(self, payload: str, load_format: str) -> None:
        update = self._client.update_weights_from_tensor
        await update([payload], load_format=load_format, deadline_s=self._deadline_s)


class ArenaReceiver(EngineReceiver):
    """The engine maps the trainer's arena and copies a slot into its parameters."""

    async def check(self, layout: tuple[TensorSpec, ...], staged: StagedWeights) -> None:
        with _as_weight_sync(self.name):
            open_arena(handle := ArenaHandle.from_json(staged.handle))
        if handle.tensors != layout:
            raise LayoutError("the arena was laid out for other tensors", engine=self.name)
        await super().check(layout, staged)

    async def load(self, staged: StagedWeights) -> None:
        async with self._update():
            await self._ask("load", arena=staged.handle)


class BucketReceiver(EngineReceiver):
    """SGLang's stock path: flattened buckets by shared memory (CPU) or CUDA IPC (GPU). It accepts
    unknown names and dies of wrong shapes, so `check` must have passed."""

    async def load(self, staged: StagedWeights) -> None:
        if self._approved is None:
            raise WeightSyncError("load before check", engine=self.name)
        async with self._update():
            for payload in json.loads(staged.handle):
                await self._send(payload, "flattened_bucket")


RECEIVERS: dict[str, type[EngineReceiver]] = {"arena": ArenaReceiver, "bucket": BucketReceiver}
"""By carrier; the trainer's ends are in `train/rank.py`."""


@contextmanager
def _as_weight_sync(engine: str) -> Iterator[None]:
    """Within: whatever the engine's server did wrong becomes a WeightSyncError that names the engine."""
    try:
        yield
    except WeightSyncError as error:
        error.engine = error.engine or engine
        raise
    except (ServerError, DeadlineError, TimeoutError) as error:
        raise WeightSyncError(f"{engine}: {error}", engine=engine) from error
