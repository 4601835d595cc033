"""What the card computes and copies per second, and whether NCCL runs."""

import torch
from torch._C._distributed_c10d import HashStore

from gpu_check.packed_rows import milliseconds
from gpu_check.result import StageSkipped, emit
from gpu_check.settings import CheckSettings

_SIDE = 8192
_COPIED_BYTES = 1 << 30


def run(settings: CheckSettings) -> None:
    if settings.smoke:
        raise StageSkipped("a smoke run has no card")
    assert torch.cuda.is_available(), "torch sees no GPU"
    properties = torch.cuda.get_device_properties(0)
    left = torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    matmul_ms = milliseconds(lambda: torch.mm(left, right), warm_up=3, rounds=10)
    copy_ms = milliseconds(lambda: target.copy_(source), warm_up=3, rounds=10)
    emit(
        gpu=properties.name,
        memory_gb=properties.total_memory / 1e9,
        matmul_tflops=2 * _SIDE**3 / matmul_ms / 1e9,
        copy_tb_per_s=2 * _COPIED_BYTES / copy_ms / 1e9,
    )
    store = HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    ones = torch.ones(4, device="cuda")
    torch.distributed.all_reduce(ones)
    emit(nccl=ones.tolist())
    torch.distributed.destroy_process_group()
