"""The memory that the weight arena is in: the GPU's where trainer and engines share
one, else the host's.

In the host's memory every update goes down from the GPU and up again. In the GPU's it
is two copies within it, and takes its room. Imports no torch.
"""

from invrl.families.hf_config import read_hf_config
from invrl.run.settings.config import Config
from invrl.train.cost.model_size import ModelSize

_LARGEST_SHARE = 1 / 8
"""Share of the GPU's memory for both slots: the rest is the trainer's and the
engines'."""
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def arena_on_gpu(config: Config, *, gpus: int, gpu_bytes: int) -> bool:
    """Whether the arena is on a GPU, on a machine with so many GPUs, the smallest with
    so much memory.

    With several GPUs 'auto' is the host's memory: trainer ranks and engines may not see
    one another's.
    """
    settings = config.weight_sync
    if settings.weight_arena_device != "auto":
        return settings.weight_arena_device == "cuda"
    shares_gpu = gpus == 1 and not config.trains_alone
    if (
        not shares_gpu
        or settings.weight_transport != "arena"
        or settings.weight_arena != "copy"
    ):
        return False
    folder = config.model.folder
    num_parameters = ModelSize.of(folder, read_hf_config(folder)).total
    return (
        2 * num_parameters * _ITEM_BYTES[config.engine.engine_dtype]
        <= _LARGEST_SHARE * gpu_bytes
    )
