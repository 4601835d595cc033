"""`python -m gpu_check.bucket_receiver`: takes SGLang's buckets as an engine does, and
says what it holds.

A line of input has the serialized buckets of a version; a line of output the seconds
that they took and the checksums of all tensors.
"""

import json
import sys
import time

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
        started = time.monotonic()
        for payload in json.loads(line):
            value = MultiprocessingSerializer.deserialize(payload)
            bucket = FlattenedTensorBucket(
                flattened_tensor=value["flattened_tensor"], metadata=value["metadata"]
            )
            for name, tensor in bucket.reconstruct_tensors():
                held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
        checksums = {name: checksum(tensor) for name, tensor in held.items()}
        print(json.dumps({"seconds": seconds, "checksums": checksums}), flush=True)


if __name__ == "__main__":
    main()
