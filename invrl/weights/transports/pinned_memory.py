"""Host memory that a GPU reads and writes by itself.

Memory that is mapped from a file is pageable: the driver copies it through a buffer,
and the host waits meanwhile. Registered with the driver it is pinned until it is freed.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def pin(memory: torch.Tensor) -> None:
    """Pin mapped memory until no tensor uses it. Where the driver refuses, it stays
    pageable, and a warning says so."""
    import torch

    runtime: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    status = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if status != 0:
        logger.warning(
            "%.2f GB of the host are not pinned, so copies to and from the GPU are slower: CUDA error %d",
            memory.nbytes / 1e9,
            status,
        )
        return
    # Before it is unmapped: a mapping that takes its address would count as pinned.
    storage = memory.untyped_storage()
    weakref.finalize(storage, runtime.cudaHostUnregister, address).atexit = False
