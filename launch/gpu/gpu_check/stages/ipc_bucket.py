"""SGLang's flattened buckets by CUDA IPC into another process (`bucket_receiver.py`),
each freed before the next: the bytes are equal in every version, and memory does not
grow."""

import json
import subprocess
import sys
import time
from statistics import median

import torch

from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from invrl.types.weights import WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, make_spec
from invrl.weights.transports.buckets import BucketSender, bucket_names

NUM_TENSORS = 200
"""Of a million numbers each, in bfloat16."""
_SIDE = 1024
_VERSIONS = 20
_BUCKET_BYTES = 64 << 20


def run(settings: CheckSettings) -> None:
    num_tensors = 4 if settings.smoke else NUM_TENSORS
    tensors = {
        f"layer.{index}.weight": torch.randn(
            _SIDE, _SIDE, device=settings.device
        ).bfloat16()
        for index in range(num_tensors)
    }
    layout = tuple(make_spec(name, tensor) for name, tensor in tensors.items())
    buckets = bucket_names(layout, _BUCKET_BYTES)
    sender = BucketSender(
        layout, bucket_bytes=_BUCKET_BYTES, device=torch.device(settings.device)
    )
    stage_s: list[float] = []
    load_s: list[float] = []
    reserved: list[float] = []
    wrong = 0
    num_bytes = 0
    receiver = subprocess.Popen(
        [sys.executable, "-m", "gpu_check.bucket_receiver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    try:
        assert receiver.stdout.readline() == "ready\n", (
            "the receiver ended before it was ready"
        )
        for version in range(1, 4 if settings.smoke else _VERSIONS + 1):
            for tensor in tensors.values():
                tensor.add_(0.25)
            started = time.monotonic()
            staged = sender.stage(WeightVersion(version), tensors.items())
            stage_s.append(time.monotonic() - started)
            num_bytes = staged.num_bytes
            held: dict[str, str] = {}
            started = time.monotonic()
            for index, names in enumerate(buckets):
                weights = [(name, tensors[name]) for name in names]
                [bucket] = sender.bucket(index, weights)
                receiver.stdin.write(bucket + "\n")
                receiver.stdin.flush()
                held |= json.loads(receiver.stdout.readline())["checksums"]
            load_s.append(time.monotonic() - started)
            wrong += sum(
                held.get(name) != checksum(tensor) for name, tensor in tensors.items()
            )
            reserved.append(
                0.0 if settings.smoke else torch.cuda.memory_reserved() / 1e9
            )
    finally:
        receiver.kill()
        receiver.wait()
    emit(
        wrong_tensors=wrong,
        num_bytes=num_bytes,
        stage_s=median(stage_s),
        load_s=median(load_s),
        reserved_gb={"third": reserved[2], "last": reserved[-1]},
    )
    assert wrong == 0, f"{wrong} tensors were not what was sent"
    assert reserved[-1] <= reserved[2], "the sender's memory grew"
