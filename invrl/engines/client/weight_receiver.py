"""One engine's side of a weight update: the transaction's calls as requests to SGLang.

Invariant: names, shapes and dtypes are checked inside the engine before any of its
weights is overwritten (a wrong shape would kill it, and it would silently accept an
unknown name). Every load is followed by checksums, which the transaction compares with
the trainer's. Only `commit` changes the version's name.

With `ArenaReceiver` the engine copies from the trainer's shared memory, with
`FolderReceiver` from a folder that the trainer wrote; with `DeltaReceiver` it applies
differences; with `BroadcastReceiver` it receives the trainer's broadcast to several
engines. `BucketReceiver` uses SGLang's own flattened buckets. The code inside the
engine is `weights/loader/weight_loader.py`.
"""

import asyncio
import base64
import contextlib
import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.inside_sglang.atomic_weight_load import WEIGHT_LOADER
from invrl.engines.inside_sglang.engine_routes import REPLY_PREFIX
from invrl.errors import (
    ChecksumError,
    DeadlineError,
    InvrlError,
    LayoutError,
    ServerError,
    WeightSyncError,
)
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.checksums.multilinear_checksum import rank_checksums
from invrl.weights.config import ArenaWeights, FileWeights, WeightsConfig
from invrl.weights.loader.loader_messages import LoaderReply, LoaderRequest, read_reply
from invrl.weights.tensors.tensor_slice import EngineRank
from invrl.weights.transports.arena import ArenaHandle, hash_slot
from invrl.weights.transports.broadcast import GroupInvitation
from invrl.weights.transports.buckets import BucketHandle
from invrl.weights.transports.delta_folder import DeltaHandle
from invrl.weights.transports.weight_files import FileSource, ServedHandle
from invrl.weights.update.verification import ReadBack

logger = logging.getLogger(__name__)
_PROTOCOL = pickle.PROTO + b"\x02"
_EMPTY_TENSOR = (
    pickle.GLOBAL + b"torch\nFloatTensor\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
)
"""Pickled call `torch.FloatTensor()`."""
_FETCH_SHARE = 0.8
"""Share of a load's deadline in which an engine fetches files, so that it reports
missing files itself."""
_ROOM_DEADLINE_S = 10.0
"""Deadline of a canary in an engine that may be full."""
_END_AFTER_FAILURE_S = 5.0
"""Seconds to end an update that has failed or was cancelled, as by the deadline of its
phase: an engine that has hung until then does not answer this call either, and the
other engines wait meanwhile."""


class EngineReceiver(ABC):
    """Code shared by every transport; a transport implements `_load`."""

    def __init__(
        self,
        name: str,
        client: SglangClient,
        settings: WeightsConfig,
        *,
        num_ranks: int = 1,
    ) -> None:
        """`settings.timeout_s` is the deadline of one call that moves or hashes
        weights. `num_ranks`: the processes of the engine, each of which has a slice of
        the weights."""
        self.name = name
        self._client = client
        self._settings = settings
        self._deadline_s = settings.timeout_s
        self._num_ranks = num_ranks
        self._checksums_add_up = num_ranks > 1
        self._aliases = False
        self._approved_layout: WeightLayout = ()
        self._answered: tuple[WeightVersion, Mapping[str, str]] | None = None
        """Version loaded last, and the load's checksums until they are read."""
        self._is_asleep = False
        self.is_paused = False
        """Tells the health check that a paused engine makes no token."""
        self.is_loading = False
        """Tells the health check that the engine copies or hashes its weights in one
        call, during which its scheduler is silent. That call has `deadline_s`, and an
        engine that exceeds it fails the update."""
        self.replies_over_http = False
        """The engine may be on another machine, where its weight loader cannot write
        into our folders."""

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """Raise LayoutError unless the layout is exactly the engine's weights.

        The engine is asked once per layout: outside a pause it answers only when no
        request runs, and its parameters do not change.
        """
        if set(staged.checksums) != {spec.name for spec in layout}:
            raise LayoutError(
                "the staged tensors are not those of the layout", engine=self.name
            )
        self._checksums_add_up = staged.checksums_add_up or self._num_ranks > 1
        if layout != self._approved_layout:
            await self._ask_loader(layout)
            self._approved_layout = layout

    async def pause(self) -> None:
        """The setting `weights.inflight` decides what becomes of running requests."""
        self.is_paused = True
        inflight = self._settings.inflight
        if inflight == "in_place":
            await self._client.pause("in_place")
            return
        timeout_s = self._settings.drain_timeout_s
        if inflight == "drain" and not await self._client.drain(timeout_s):
            logger.warning(
                "%s retracts requests that did not end within %g s",
                self.name,
                timeout_s,
            )
        await self._client.pause_and_flush()

    async def sleep(self) -> None:
        """Free the cache of an engine that is paused and flushed, as `retract` and
        `drain` leave it."""
        self._is_asleep = True
        try:
            await self._client.release_cache_memory()
        except ServerError:  # it has refused
            self._is_asleep = False
            raise

    async def wake(self) -> None:
        if self._is_asleep:
            await self._client.resume_cache_memory()
            self._is_asleep = False

    async def load(self, staged: StagedWeights) -> None:
        """Load the weights. Raises as the transport's `_load` does."""
        self._answered = None
        checksums = await self._load(staged)
        if checksums is not None:
            self._answered = (staged.version, checksums)

    @abstractmethod
    async def _load(self, staged: StagedWeights) -> Mapping[str, str] | None:
        """Return the checksums of the engine's reply, None if it has none."""
        ...

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        """Return the checksums from the load of `staged`, once; without them, or at a
        second call, read the engine's parameters back."""
        answered = self._answered
        self._answered = None
        if answered is not None and answered[0] == staged.version:
            return answered[1]
        reply = await self._ask_loader(self._approved_layout, digest=True)
        return reply.checksums

    async def read_back(self, layout: WeightLayout) -> ReadBack:
        """Read the engine's weights while it serves: it pauses between two steps, and
        its requests continue with their caches. Not during an update. After an error
        the engine may still be paused: `is_paused`."""
        paused_at = time.monotonic()
        self.is_paused = True
        try:
            await self._client.pause("in_place")
            reply = await self._ask_loader(layout, digest=True)
            version = await self._client.weight_version()
        finally:
            await self.resume()
        return ReadBack(
            version=version,
            checksums=reply.checksums,
            paused_s=time.monotonic() - paused_at,
        )

    async def commit(self, version: WeightVersion) -> None:
        reported = await self._client.name_weights(version)
        if reported != str(version):
            raise WeightSyncError(
                f"calls itself version {reported}, not {version}", engine=self.name
            )

    async def resume(self) -> None:
        await self._client.resume()
        self.is_paused = False

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Return the prompts' log-probs before the engine's queue continues."""
        if self._settings.inflight == "in_place":
            return await self._logprobs_beside_requests(prompts)
        return await self._client.prompt_logprobs(prompts, deadline_s=self._deadline_s)

    async def _logprobs_beside_requests(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        """Return the prompts' log-probs from an engine whose requests were not
        retracted. They may leave no room: then they are retracted now, and continue
        afterwards."""
        with contextlib.suppress(DeadlineError):
            return await self._client.prompt_logprobs(
                prompts, deadline_s=_ROOM_DEADLINE_S
            )
        logger.warning(
            "%s retracts its requests: they left no room for the canary", self.name
        )
        self.is_paused = True
        try:
            await self._client.pause("retract")
        finally:
            await self._client.resume()
            self.is_paused = False
        return await self._client.prompt_logprobs(prompts, deadline_s=self._deadline_s)

    async def _ask_loader(
        self,
        layout: WeightLayout,
        *,
        arena: ArenaHandle | None = None,
        folder: str = "",
        chain: tuple[str, ...] = (),
        source: FileSource | None = None,
        broadcast: GroupInvitation | None = None,
        digest: bool = False,
    ) -> LoaderReply:
        """Send one request to the loader inside each rank of the engine. The checksums
        of the reply are those of whole tensors."""
        with TemporaryDirectory(prefix=REPLY_PREFIX) as reply_folder:
            paths = [
                Path(reply_folder, f"{self.name}-{index}")
                for index in range(self._num_ranks)
            ]
            requests = [
                LoaderRequest(
                    reply_path=self._path_for_loader(paths[index]),
                    rank=EngineRank(index=index, size=self._num_ranks),
                    checksums_add_up=self._checksums_add_up,
                    tensors=layout,
                    arena=arena,
                    alias=self._aliases,
                    folder=folder,
                    chain=chain,
                    source=source,
                    fetch_deadline_s=_FETCH_SHARE * self._deadline_s,
                    broadcast=broadcast,
                    digest=digest,
                )
                for index in range(self._num_ranks)
            ]
            await self._send([_payload(request) for request in requests], WEIGHT_LOADER)
            if self.replies_over_http:
                await self._fetch_replies(paths)
            replies = [read_reply(str(path)) for path in paths]
        if not self._checksums_add_up:
            return replies[0]
        return LoaderReply(
            checksums=rank_checksums([reply.checksums for reply in replies])
        )

    def _located(self, staged: StagedWeights) -> tuple[str, FileSource | None]:
        """Return the handle of the staged files, and their source if the engine fetches
        them; None: it opens them."""
        settings = self._settings
        if not isinstance(settings, FileWeights) or not settings.host:
            return staged.handle, None
        served = msgspec.json.decode(staged.handle, type=ServedHandle)
        return served.handle, served.source

    def _path_for_loader(self, path: Path) -> str:
        """Return the loader's reply path: ours, or a bare name that no other reply
        has."""
        if self.replies_over_http:
            return f"{path.parent.name}-{path.name}"
        return str(path)

    async def _fetch_replies(self, paths: Sequence[Path]) -> None:
        for path in paths:
            path.write_bytes(
                await self._client.loader_reply(self._path_for_loader(path))
            )

    async def _send(self, payloads: Sequence[str], load_format: str) -> None:
        """Send a payload to each rank."""
        with self._loading():
            await self._client.update_weights_from_tensor(
                payloads, load_format=load_format, deadline_s=self._deadline_s
            )

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Say that the engine loads, during one call."""
        self.is_loading = True
        try:
            yield
        finally:
            self.is_loading = False


def _payload(request: LoaderRequest) -> str:
    """Return a request as SGLang takes it: the name of an empty pickled tensor, in a
    list. It is pickled without torch, which would take 2 CPU-seconds to import."""
    request_json = msgspec.json.encode(request).decode()
    name = pickle.dumps(request_json, protocol=2).removeprefix(_PROTOCOL)
    pair = name.removesuffix(pickle.STOP) + _EMPTY_TENSOR + pickle.TUPLE2
    pickled = _PROTOCOL + pickle.EMPTY_LIST + pair + pickle.APPEND + pickle.STOP
    return base64.b64encode(pickled).decode()


class ArenaReceiver(EngineReceiver):
    """The engine maps the trainer's arena and copies a slot into its parameters, or
    points them at it.

    What proves a load, without reading the parameters back:

    - copied: the request that copies answers with checksums of what it wrote;
    - aliased: `check` has hashed the slot, outside of the engine and before the pause,
      and the engine says which of its parameters lie there.

    With the first load, every n-th after it (`readback_every`), and one that
    follows a load which was not proved, the engine reads all its parameters back
    instead. So it does where `check` was not called for what an alias loads.
    """

    def __init__(
        self,
        name: str,
        client: SglangClient,
        settings: ArenaWeights,
        *,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(name, client, settings, num_ranks=num_ranks)
        self._aliases = settings.arena_mode == "alias"
        self._readback_every = settings.readback_every
        self._must_read_back = True
        self._loads_since_readback = 0
        self._hashed: StagedWeights | None = None
        """Version whose slot holds the staged bytes, as `check` verified."""

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        """Check the layout and the arena. If parameters alias a slot of host memory,
        also raise ChecksumError unless the slot holds the staged bytes."""
        arena = _staged_arena(staged)
        arena.check()
        await super().check(layout, staged)
        if self._aliases and arena.cuda is None:
            held = await asyncio.to_thread(hash_slot, arena, layout)
            wrong = [
                name for name, value in held.items() if staged.checksums[name] != value
            ]
            if wrong:
                reason = f"{len(wrong)} of {len(held)} tensors in the arena's slot are not what was staged"
                raise ChecksumError(f"{reason}, {wrong[0]} first", engine=self.name)
            self._hashed = staged

    async def _load(self, staged: StagedWeights) -> Mapping[str, str]:
        self._loads_since_readback += 1
        is_due = self._loads_since_readback == self._readback_every
        is_unhashed = self._aliases and self._hashed is not staged
        reads_back = self._must_read_back or is_due or is_unhashed
        self._must_read_back = True  # unless this load is proved
        reply = await self._ask_loader(
            self._approved_layout, arena=_staged_arena(staged), digest=reads_back
        )
        checksums = reply.checksums
        if self._aliases and not reads_back:
            checksums = {name: staged.checksums[name] for name in reply.aliased}
        self._must_read_back = checksums != staged.checksums
        if reads_back:
            self._loads_since_readback = 0
        return checksums


def _staged_arena(staged: StagedWeights) -> ArenaHandle:
    return msgspec.json.decode(staged.handle, type=ArenaHandle)


class FolderReceiver(EngineReceiver):
    """Copies from the folder of the version, on a disk shared with the trainer or
    fetched."""

    async def _load(self, staged: StagedWeights) -> Mapping[str, str]:
        folder, source = self._located(staged)
        reply = await self._ask_loader(
            self._approved_layout, folder=folder, source=source, digest=True
        )
        return reply.checksums


class DeltaReceiver(EngineReceiver):
    """Applies the differences that the engine lacks, from such folders."""

    async def _load(self, staged: StagedWeights) -> Mapping[str, str]:
        handle, source = self._located(staged)
        chain = msgspec.json.decode(handle, type=DeltaHandle).chain
        reply = await self._ask_loader(
            self._approved_layout, chain=chain, source=source, digest=True
        )
        return reply.checksums


class BroadcastReceiver(EngineReceiver):
    """Receives a broadcast of the trainer, together with other engines
    (`weights/transports/broadcast_loads.py`)."""

    async def _load(self, staged: StagedWeights) -> Mapping[str, str]:
        """Load from the broadcast. Raises BroadcastError if it broke; the engine may
        then hold a mix."""
        invitation = msgspec.json.decode(staged.handle, type=GroupInvitation)
        reply = await self._ask_loader(
            self._approved_layout, broadcast=invitation, digest=True
        )
        return reply.checksums


class BucketReceiver(EngineReceiver):
    """Uses SGLang's own path: flattened buckets by shared memory (CPU) or CUDA IPC
    (GPU).

    SGLang accepts unknown names and dies of wrong shapes here, so `check` must have
    passed.
    """

    async def _load(self, staged: StagedWeights) -> None:
        assert self._approved_layout, "load before check"
        handle = msgspec.json.decode(staged.handle, type=BucketHandle)
        async with self._update(handle):
            for payload in handle.payloads:
                await self._send([payload], "flattened_bucket")

    @contextlib.asynccontextmanager
    async def _update(self, handle: BucketHandle) -> AsyncIterator[None]:
        """SGLang takes the buckets of a version only between a begin and an end."""
        if handle.begins:
            await self._begin_update()
        try:
            yield
        except BaseException:
            with contextlib.suppress(InvrlError, TimeoutError):
                async with asyncio.timeout(_END_AFTER_FAILURE_S):
                    await self._client.end_weight_update()
            raise
        if handle.ends:
            await self._client.end_weight_update()

    async def _begin_update(self) -> None:
        try:
            await self._client.begin_weight_update()
        except ServerError:
            # Who began an update before may have been killed, or given up, before its
            # end.
            await self._client.end_weight_update()
            await self._client.begin_weight_update()
