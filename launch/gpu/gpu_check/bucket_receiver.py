"""`python -m gpu_check.bucket_receiver`: takes SGLang's buckets as an engine does, and
says what it holds.

A line of input is a serialized bucket; a line of output has the checksums of its
tensors, and says that the bucket may be freed.
"""

import json
import sys

import torch

from invrl.host import sglang_on_cpu
from invrl.weights.tensors.tensor_spec import checksum


def main() -> None:
    sglang_on_cpu.make_importable()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    held: dict[str, torch.Tensor] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        value = MultiprocessingSerializer.deserialize(line.strip())
        bucket = FlattenedTensorBucket(
            flattened_tensor=value["flattened_tensor"], metadata=value["metadata"]
        )
        tensors = bucket.reconstruct_tensors()
        for name, tensor in tensors:
            held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        names = [name for name, _ in tensors]
        # The sender may free the bucket.
        del value, bucket, tensors, tensor  # pyright: ignore[reportPossiblyUnboundVariable]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        checksums = {name: checksum(held[name]) for name in names}
        print(json.dumps({"checksums": checksums}), flush=True)


if __name__ == "__main__":
    main()
