"""One engine's side of a weight update: what the transaction calls, put into SGLang's terms.

Invariant: names, shapes and dtypes are checked inside the engine before a byte moves (it would die of
a wrong shape and silently accept an unknown name), checksums are read back from the parameters that
serve, and the version is named only by `commit`. `ArenaReceiver` has the engine copy from the
trainer's shared memory; `BucketReceiver` uses SGLang's own flattened buckets. Built by `fleet`,
driven by `weight_sync`; the loader inside the engine is `weight_loader`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import DeadlineError, LayoutError, ServerError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.rollout.engine_server import WEIGHT_LOADER
from invrl.rollout.sglang_client import SglangClient
from invrl.rollout.weight_loader import LoaderOp, LoaderReply, LoaderRequest, read_reply
from invrl.types import TensorSpec, WeightVersion
from invrl.weight_arena import ArenaHandle, num_bytes, open_arena

if TYPE_CHECKING:
    import torch


class EngineReceiver(ABC):
    """What every carrier shares; a carrier is `load`."""

    def __init__(
        self, name: str, client: SglangClient, *, reply_folder: Path, deadline_s: float = 120.0
    ) -> None:
        self._name = name
        self._client = client
        self._reply_folder = reply_folder
        self._deadline_s = deadline_s
        self._approved: WeightLayout | None = None

    @property
    def name(self) -> str:
        return self._name

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """LayoutError unless the layout is exactly the engine's weights. The engine is asked once per
        layout: outside a pause it answers only when no request runs, and nothing about it changes."""
        if set(staged.checksums) != {spec.name for spec in layout.tensors}:
            raise LayoutError("what was staged is not what the layout names", engine=self._name)
        self._check_carrier(layout, staged)
        if layout != self._approved:
            async with self._update():
                await self._ask("check", tensors=layout.tensors)
            self._approved = layout

    async def pause(self) -> None:
        with _as_weight_sync(self._name):
            await self._client.pause("retract")
            await self._client.flush_cache()

    @abstractmethod
    async def load(self, staged: StagedWeights) -> None: ...

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        if self._approved is None:
            raise WeightSyncError("checksums before check", engine=self._name)
        async with self._update():
            reply = await self._ask("digest", tensors=self._approved.tensors)
        return reply.checksums

    async def commit(self, version: WeightVersion) -> None:
        with _as_weight_sync(self._name):
            await self._client.set_weight_version(version)
            named = await self._client.weight_version()
            if named != str(version):
                raise WeightSyncError(f"calls itself version {named}, not {version}", engine=self._name)

    async def resume(self) -> None:
        with _as_weight_sync(self._name):
            await self._client.resume()

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        with _as_weight_sync(self._name):
            return await self._client.prompt_logprobs(prompts, deadline_s=self._deadline_s)

    async def close(self) -> None:
        await self._client.close()

    def _check_carrier(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """LayoutError where what the carrier holds is not the layout."""
        del layout, staged

    @asynccontextmanager
    async def _update(self) -> AsyncIterator[None]:
        """SGLang takes weights only between these two calls."""
        with _as_weight_sync(self._name):
            await self._client.begin_weight_update()
            try:
                yield
            finally:
                await self._client.end_weight_update()

    async def _ask(self, op: LoaderOp, *, tensors: Sequence[TensorSpec] = (), arena: str = "") -> LoaderReply:
        """One operation of the loader inside the engine, within `_update`."""
        nonce = secrets.token_hex(8)
        self._reply_folder.mkdir(parents=True, exist_ok=True)
        request = LoaderRequest(
            op=op,
            nonce=nonce,
            reply_path=str(self._reply_folder / f"{self._name}-{nonce}.reply"),
            tensors=[(spec.name, list(spec.shape), spec.dtype) for spec in tensors],
            arena=arena,
        )
        message = base64.b64encode(_empty_tensor_named(msgspec.json.encode(request).decode())).decode()
        await self._client.update_weights_from_tensor(
            [message], load_format=WEIGHT_LOADER, deadline_s=self._deadline_s
        )
        return read_reply(request.reply_path, nonce)


class ArenaReceiver(EngineReceiver):
    """The engine maps the trainer's arena and copies a slot into its parameters."""

    async def load(self, staged: StagedWeights) -> None:
        async with self._update():
            await self._ask("load", arena=staged.handle)

    def _check_carrier(self, layout: WeightLayout, staged: StagedWeights) -> None:
        with _as_weight_sync(self._name):
            arena = open_arena(ArenaHandle.from_json(staged.handle))
        if arena.tensors != layout.tensors:
            raise LayoutError("the arena was laid out for other tensors", engine=self._name)


class BucketReceiver(EngineReceiver):
    """SGLang's stock path: flattened buckets by shared memory (CPU) or CUDA IPC (GPU). It accepts
    unknown names and dies of wrong shapes, so `check` must have passed."""

    async def load(self, staged: StagedWeights) -> None:
        if self._approved is None:
            raise WeightSyncError("load before check", engine=self._name)
        async with self._update():
            for payload in json.loads(staged.handle):
                await self._client.update_weights_from_tensor(
                    [payload], load_format="flattened_bucket", deadline_s=self._deadline_s
                )


class BucketSender:
    """The trainer's end of the bucket carrier: `stage` serialises handles of buckets of bounded size.
    Keeps the two newest versions alive. Shared memory by file on CPU: nothing but a killed trainer
    leaves a file behind (the arena has no such flaw)."""

    def __init__(self, tensors: Sequence[TensorSpec], *, bucket_bytes: int = 64 << 20) -> None:
        self._tensors = tuple(tensors)
        self._bucket_bytes = bucket_bytes
        self._alive: dict[WeightVersion, list[torch.Tensor]] = {}

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """As `ArenaWriter.stage`. Raises LayoutError."""
        import time

        from invrl.weight_arena import checksum

        start = time.monotonic()
        given = {name: tensor.detach() for name, tensor in tensors}
        specs = tuple(
            TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for name, t in given.items()
        )
        if sorted(specs, key=lambda s: s.name) != sorted(self._tensors, key=lambda s: s.name):
            raise LayoutError("the tensors to stage are not those of the layout")
        while len(self._alive) > 1:
            del self._alive[min(self._alive)]
        self._alive[version] = []
        payloads = [self._bucket(version, given, group) for group in self._groups()]
        return StagedWeights(
            version=version,
            handle=json.dumps(payloads),
            checksums={name: checksum(tensor) for name, tensor in given.items()},
            num_bytes=sum(map(num_bytes, self._tensors)),
            seconds=time.monotonic() - start,
        )

    def _groups(self) -> Iterable[list[str]]:
        """Names in layout order; a tensor over the bound travels alone."""
        group: list[str] = []
        size = 0
        for spec in self._tensors:
            if group and size + num_bytes(spec) > self._bucket_bytes:
                yield group
                group, size = [], 0
            group.append(spec.name)
            size += num_bytes(spec)
        if group:
            yield group

    def _bucket(self, version: WeightVersion, given: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
        import torch.multiprocessing

        from invrl.rollout import cpu_stand_ins

        cpu_stand_ins.apply()
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        bucket = FlattenedTensorBucket(named_tensors=[(name, given[name].contiguous()) for name in names])
        flat = bucket.get_flattened_tensor()
        if not flat.is_cuda:
            # The default hands over file descriptors, which kills the server on the other end.
            torch.multiprocessing.set_sharing_strategy("file_system")
            flat.share_memory_()
        self._alive[version].append(flat)
        value = {"flattened_tensor": flat, "metadata": bucket.get_metadata()}
        return str(MultiprocessingSerializer.serialize(value, output_str=True))


class _as_weight_sync:
    """Within: whatever the engine's server did wrong becomes a WeightSyncError that names the engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WeightSyncError):
            error.engine = error.engine or self._engine
        elif isinstance(error, ServerError | DeadlineError | asyncio.TimeoutError):
            raise WeightSyncError(f"{self._engine}: {error}", engine=self._engine) from error


def _empty_tensor_named(text: str) -> bytes:
    """A pickled [(text, empty tensor)]: the name carries the request."""
    import torch

    return pickle.dumps([(text, torch.empty(0))])
