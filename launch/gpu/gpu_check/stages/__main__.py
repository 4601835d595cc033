"""`python -m gpu_check.stages NAME SETTINGS`: one stage, in this process."""

import faulthandler
import importlib
import os
import signal
import sys

from gpu_check.result import StageSkipped, emit, emit_skipped
from gpu_check.stage import parse_settings_argument
from gpu_check.stages import STAGES

# SGLang 0.5.21 next to torch 2.11 (it pins 2.13): the kernel package that fits is an
# older one, and its radix tree in Rust misreads dtypes there.
os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")


def main(name: str, settings_json: str) -> None:
    signal.signal(signal.SIGTERM, _end)
    module = importlib.import_module(f"gpu_check.stages.{name}")
    try:
        module.run(parse_settings_argument(settings_json))
    except StageSkipped as reason:
        emit_skipped(str(reason))
    except Exception as error:
        _emit_memory(name, error)
        raise


def _end(number: int, _: object) -> None:
    """At the deadline: says in the log where the stage is, and does what a stage does
    at its end."""
    faulthandler.dump_traceback()
    sys.exit(128 + number)


def _emit_memory(name: str, error: Exception) -> None:
    """Where this process ran out of the card's memory: how much it has, and what needs
    less."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return
    free, total = torch.cuda.mem_get_info()
    emit(
        out_of_memory={
            "allocated_gb": torch.cuda.memory_allocated() / 1e9,
            "most_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.memory_reserved() / 1e9,
            "free_gb": free / 1e9,
            "total_gb": total / 1e9,
            "to_need_less": STAGES[name].smaller,
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
