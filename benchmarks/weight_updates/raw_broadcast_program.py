"""`python -m benchmarks.weight_updates.raw_broadcast_program PORT NUM_BYTES COUNT
DEADLINE_S`: receives plain broadcasts.

It joins a process group of two whose store listens at the port of loopback, as torch
makes such groups, and takes the same number of bytes again and again in one tensor.
"""

import sys
from datetime import timedelta

import torch

from invrl.host.network.rendezvous import join_store


def _main(port: int, num_bytes: int, count: int, deadline_s: float) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=deadline_s)
    store = join_store("127.0.0.1", port, world_size=2, timeout=timeout)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=1, world_size=2, timeout=timeout
    )
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    for _ in range(count):
        torch.distributed.barrier()
        torch.distributed.broadcast(target, src=0)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
