"""Makes torch say that an H100 is there, as far as imports and the checks of arguments
go.

SGLang's kernels are compiled for the card that torch reports; compiling needs nvcc and
no card.
"""

from types import SimpleNamespace

import torch

_GIB = 1 << 30
_CAPABILITY = (9, 0)
_NAME = "NVIDIA H100 80GB HBM3"
_PROPERTIES = SimpleNamespace(
    name=_NAME,
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    uuid="GPU-0",
    gcnArchName="",
    is_integrated=0,
    warp_size=32,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    total_memory=80 * _GIB,
)


def pretend_card() -> None:
    """Call it before anything asks torch for its card."""
    replacements = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda _=None: _NAME,
        "get_device_capability": lambda _=None: _CAPABILITY,
        "get_device_properties": lambda _=None: _PROPERTIES,
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda _=None: (79 * _GIB, 80 * _GIB),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
