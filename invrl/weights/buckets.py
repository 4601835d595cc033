"""The trainer's end of the bucket transport: SGLang's flattened buckets, by CUDA IPC on a GPU and by shared
memory on a CPU. Imports torch and sglang only where tensors are touched. Used by
`train/rank.py`; the engines' end is `rollout/weight_receiver.BucketReceiver`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from invrl.errors import LayoutError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types import WeightVersion
from invrl.weights.tensor_spec import checksum, num_bytes, spec_of

if TYPE_CHECKING:
    import torch


class BucketSender:
    """The trainer's end of the bucket transport: `stage` serialises handles of buckets of `bucket_bytes` and
    one tensor at most. Keeps what it staged last and the version before that alive. Shared memory by file on
    CPU: nothing but a killed trainer leaves a file behind (the arena has no such flaw)."""

    def __init__(self, layout: WeightLayout, *, bucket_bytes: int = 64 << 20) -> None:
        self._layout = layout
        self._bucket_bytes = bucket_bytes
        self._alive: dict[WeightVersion, list[torch.Tensor]] = {}

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """As `ArenaWriter.stage`. Raises LayoutError."""
        given = {name: tensor.detach() for name, tensor in tensors}
        specs = [spec_of(name, tensor) for name, tensor in given.items()]
        if sorted(specs, key=lambda s: s.name) != sorted(self._layout, key=lambda s: s.name):
            raise LayoutError("the tensors to stage are not those of the layout")
        before = [old for old in self._alive if old != version][-1:]
        self._alive = {old: self._alive[old] for old in before} | {version: []}
        payloads = [self._bucket(version, given, group) for group in self._groups()]
        handle = json.dumps(payloads)
        checksums = {name: checksum(tensor) for name, tensor in given.items()}
        size = sum(map(num_bytes, self._layout))
        return StagedWeights(version=version, handle=handle, checksums=checksums, num_bytes=size)

    def _groups(self) -> Iterable[list[str]]:
        """Names in layout order; a bucket holds what begins within the same `bucket_bytes`."""
        *starts, _ = accumulate(map(num_bytes, self._layout), initial=0)
        placed = zip((start // self._bucket_bytes for start in starts), self._layout, strict=True)
        for _, group in groupby(placed, lambda each: each[0]):
            yield [spec.name for _, spec in group]

    def _bucket(self, version: WeightVersion, given: Mapping[str, torch.Tensor], names: Sequence[str]) -> str:
        import torch.multiprocessing

        from invrl.host import sglang_on_cpu as cpu_stand_ins

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
