"""The trainer's end of the weight transport `bucket`: SGLang's flattened buckets, by
CUDA IPC on a GPU and by shared memory on a CPU. Imports torch and sglang only where
tensors are touched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from invrl.errors import LayoutError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums.checksums import tensor_checksums, whole_hash
from invrl.weights.tensors.engine_parameters import in_one_call
from invrl.weights.tensors.tensor_spec import make_spec, num_bytes

if TYPE_CHECKING:
    import torch


class BucketSender:
    """Serialises handles of buckets. A bucket holds about `bucket_bytes`, and a few
    tensors more where the engine fuses them.

    Keeps the memory of the last two staged versions alive. On a CPU the shared memory
    is a file, which only a killed trainer leaves behind (the arena leaves nothing).
    """

    def __init__(self, layout: WeightLayout, *, bucket_bytes: int = 64 << 20) -> None:
        self._layout = layout
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[WeightVersion, list[torch.Tensor]] = {}
        """Memory of the versions that are kept alive."""

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Stage a version as `ArenaWriter.stage` does. Raises LayoutError."""
        tensors_by_name: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            tensors_by_name[name] = tensor.detach()
        specs = [make_spec(name, tensor) for name, tensor in tensors_by_name.items()]
        if _by_name(specs) != _by_name(self._layout):
            raise LayoutError("the tensors to stage are not those of the layout")
        self._keep_newest_besides(version)
        self._buckets[version] = []
        payloads: list[str] = []
        for names in self._bucket_names():
            payload = self._serialise_bucket(version, tensors_by_name, names)
            payloads.append(payload)
        on_gpu = any(tensor.is_cuda for tensor in tensors_by_name.values())
        checksums = tensor_checksums(tensors_by_name, whole_hash(adds_up=on_gpu))
        return StagedWeights(
            version=version,
            handle=json.dumps(payloads),
            checksums=checksums,
            checksums_add_up=on_gpu,
            num_bytes=sum(num_bytes(spec) for spec in self._layout),
        )

    def _keep_newest_besides(self, version: WeightVersion) -> None:
        """Free every other version but the newest: the engines may go back to that
        one."""
        others = [staged for staged in self._buckets if staged != version]
        self._buckets = {staged: self._buckets[staged] for staged in others[-1:]}

    def _bucket_names(self) -> list[list[str]]:
        """Return the tensors of each bucket, in layout order: those that begin within
        the same `bucket_bytes`, and those that the engine fuses with the last of
        them."""
        buckets: list[list[str]] = []
        last_index = -1
        start = 0
        for spec in self._layout:
            index = start // self._bucket_bytes
            if index != last_index and not (
                buckets and in_one_call(buckets[-1][-1], spec.name)
            ):
                buckets.append([])
                last_index = index
            buckets[-1].append(spec.name)
            start += num_bytes(spec)
        return buckets

    def _serialise_bucket(
        self,
        version: WeightVersion,
        tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
    ) -> str:
        import torch.multiprocessing

        from invrl.host import sglang_on_cpu

        sglang_on_cpu.make_importable()
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        named_tensors = [(name, tensors[name].contiguous()) for name in names]
        bucket = FlattenedTensorBucket(named_tensors=named_tensors)
        flat = bucket.get_flattened_tensor()
        if flat.is_cuda:
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            # A handle then names its GPU by the UUID: engines may number the GPUs
            # differently.
            monkey_patch_torch_reductions()
        else:
            # The default strategy hands over file descriptors, which kills the server
            # on the other end.
            torch.multiprocessing.set_sharing_strategy("file_system")
            flat.share_memory_()
        self._buckets[version].append(flat)
        value = {"flattened_tensor": flat, "metadata": bucket.get_metadata()}
        return str(MultiprocessingSerializer.serialize(value, output_str=True))


def _by_name(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: spec.name)
