"""The trainer's end of the weight transport `bucket`: SGLang's flattened buckets, by
CUDA IPC on a GPU and by shared memory on a CPU.

    stage       a version into shared memory of the host, as buckets; two versions stay
    the pause   on a GPU: bucket by bucket from the trainer's parameters, each freed before the next

An engine can load either. On a GPU it gets the trainer's parameters, which are the
staged version until the next training step. The host's memory is read where that is
too late or wrong: by an engine that joins during a step, and by one that goes back to
the version before. So the GPU holds one bucket, whatever the size of the model.

On a CPU the shared memory is a file, which only a killed trainer leaves behind (the
arena leaves nothing). Imports torch and sglang only where tensors are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import LayoutError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums.checksums import (
    copy_all,
    hash_and_copy,
    whole_hash,
)
from invrl.weights.tensors.engine_parameters import in_one_call
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.arena import placed
from invrl.weights.transports.pinned_memory import pin

if TYPE_CHECKING:
    import torch

HOST_BUCKET_BYTES = 64 << 20
GPU_BUCKET_BYTES = 512 << 20
_ALIGNMENT = 64
_READERS_OF_A_VERSION = 1000
"""Loads of a version by all engines, at most."""


class BucketHandle(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `StagedWeights.handle`, as JSON."""

    payloads: list[str]
    """Serialised buckets."""
    trainer_has_more: bool = False
    """The trainer gives the same buckets from its GPU while it holds this version."""
    begins: bool = True
    """Whether the first of them is the first of the version; `ends` likewise."""
    ends: bool = True


class BucketSender:
    """Serialises handles of buckets. The host's memory holds the last two staged
    versions."""

    def __init__(
        self,
        layout: WeightLayout,
        *,
        bucket_bytes: int = HOST_BUCKET_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """`device`: GPU of the trainer, whose memory then has one bucket. None for the
        host."""
        self._layout = layout
        specs = {spec.name: spec for spec in layout}
        self._buckets = [
            _Bucket.of([specs[name] for name in names])
            for names in bucket_names(layout, bucket_bytes)
        ]
        self._slots: dict[int, _HostSlot] = {}
        """Host memory of two versions, from their first use."""
        self._slot = 1
        """Slot of the version that was staged last."""
        self._version: WeightVersion | None = None
        self._device = device
        self._sent: torch.Tensor | None = None
        """Memory of the bucket on the GPU."""
        if device is not None:
            self._sent = self._gpu_memory()

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Stage a version as `ArenaWriter.stage` does. Raises LayoutError."""
        number = 1 - self._slot
        if version == self._version:  # a failed update is tried again
            number = self._slot
        if number not in self._slots:
            self._slots[number] = _HostSlot(self._buckets)
        slot = self._slots[number]
        on_gpu = self._device is not None
        write = hash_and_copy if on_gpu else copy_all
        checksums = write(
            slot.views, placed(tensors, slot.views), whole_hash(adds_up=on_gpu)
        )
        if len(checksums) != len(slot.views):
            raise LayoutError("the tensors to stage are not those of the layout")
        slot.expect_readers()
        self._slot = number
        self._version = version
        handle = BucketHandle(payloads=slot.payloads, trainer_has_more=on_gpu)
        return StagedWeights(
            version=version,
            handle=msgspec.json.encode(handle).decode(),
            checksums=checksums,
            checksums_add_up=on_gpu,
            num_bytes=sum(num_bytes(spec) for spec in self._layout),
        )

    def bucket(
        self, index: int, tensors: Iterable[tuple[str, torch.Tensor]], copies: int = 1
    ) -> list[str]:
        """Return one bucket of these weights in the memory of the GPU, serialised for
        each of `copies` readers. It lives until the next call, or for as long as a
        reader keeps it open or has not opened it. Raises LayoutError."""
        bucket = self._buckets[index]
        # Torch counts the readers of each allocation that it shares, so no two buckets
        # are in the same one. Its cache gives the same memory again.
        self._sent = None
        if self._device is not None and self._device.type == "cuda":
            import torch

            # Torch frees what all readers have closed.
            torch.cuda.ipc_collect()
        self._sent = self._gpu_memory()
        memory = self._sent[: bucket.num_bytes]
        views = bucket.views(memory)
        written = 0
        for name, tensor in placed(tensors, views):
            views[name].copy_(tensor.detach())
            written += 1
        if written != len(views):
            raise LayoutError(f"bucket {index} lacks {len(views) - written} tensors")
        # Torch expects one reader of each handle: a second one would take a count that
        # nobody has added, and the memory would stay.
        return [bucket.serialise(memory) for _ in range(copies)]

    def _gpu_memory(self) -> torch.Tensor:
        """Allocate as much as the largest bucket takes."""
        import torch

        largest = max(bucket.num_bytes for bucket in self._buckets)
        return torch.empty(largest, dtype=torch.uint8, device=self._device)


def bucket_names(layout: WeightLayout, bucket_bytes: int) -> list[list[str]]:
    """Return the tensors of each bucket, in layout order: those that begin within the
    same `bucket_bytes`, and those that the engine fuses with the last of them."""
    buckets: list[list[str]] = []
    last_index = -1
    start = 0
    for spec in layout:
        index = start // bucket_bytes
        if index != last_index and not (
            buckets and in_one_call(buckets[-1][-1], spec.name)
        ):
            buckets.append([])
            last_index = index
        buckets[-1].append(spec.name)
        start += num_bytes(spec)
    return buckets


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Tensors, and where each begins in the memory of their bucket."""

    specs: Sequence[TensorSpec]
    starts: Sequence[int]
    num_bytes: int

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> _Bucket:
        starts: list[int] = []
        end = 0
        for spec in specs:
            starts.append(end)
            end += -(-num_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
        return cls(specs, starts, end)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in the bucket's memory, by name."""
        import torch

        views: dict[str, torch.Tensor] = {}
        for spec, start in zip(self.specs, self.starts, strict=True):
            raw_bytes = memory[start : start + num_bytes(spec)]
            dtype: torch.dtype = getattr(torch, spec.dtype)
            views[spec.name] = raw_bytes.view(dtype).view(spec.shape)
        return views

    def serialise(self, memory: torch.Tensor) -> str:
        """Return SGLang's payload for the bucket in this memory."""
        import torch

        from invrl.host import sglang_on_cpu

        sglang_on_cpu.make_importable()
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        if memory.is_cuda:
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            # A handle then names its GPU by the UUID: engines may number the GPUs
            # differently.
            monkey_patch_torch_reductions()
        metadata: list[FlattenedTensorMetadata] = []
        for spec, start in zip(self.specs, self.starts, strict=True):
            end = start + num_bytes(spec)
            entry = FlattenedTensorMetadata(
                name=spec.name,
                shape=torch.Size(spec.shape),
                dtype=getattr(torch, spec.dtype),
                start_idx=start,
                end_idx=end,
                numel=end - start,
            )
            metadata.append(entry)
        value = {"flattened_tensor": memory, "metadata": metadata}
        return str(MultiprocessingSerializer.serialize(value, output_str=True))


class _HostSlot:
    """One version in shared memory of the host, which engines open again with each
    load."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        import torch
        import torch.multiprocessing

        # The default strategy hands over file descriptors, which kills the server on
        # the other end.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._storages = [
            torch.UntypedStorage._new_shared(bucket.num_bytes)  # pyright: ignore[reportPrivateUsage]
            for bucket in buckets
        ]
        self.views: dict[str, torch.Tensor] = {}
        self.payloads: list[str] = []
        for bucket, storage in zip(buckets, self._storages, strict=True):
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            if torch.cuda.is_initialized():
                pin(memory)
            self.views |= bucket.views(memory)
            self.payloads.append(bucket.serialise(memory))

    def expect_readers(self) -> None:
        """Keep the memory's files: torch counts one reader for each payload, and
        removes a file after as many."""
        for storage in self._storages:
            for _ in range(_READERS_OF_A_VERSION):
                storage._shared_incref()  # pyright: ignore[reportPrivateUsage]
