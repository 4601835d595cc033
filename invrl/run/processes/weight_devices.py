"""The memory through which weights go to the engines: a GPU's, or the host's.

The arena is in a GPU's memory if trainer and engines share one. In host memory every
update leaves the GPU and comes back. In GPU memory it takes two copies within the GPU,
and the space for them. A broadcast goes from GPU to GPU if the run starts all engines,
on GPUs that no trainer rank is on. Does not import torch.
"""

from invrl.families.hf_config import read_hf_config
from invrl.run.processes.gpu_plan import GpuPlan
from invrl.run.settings.config import Config
from invrl.train.cost.model_size import ModelSize
from invrl.weights.config import ArenaWeights, CollectiveWeights

_LARGEST_SHARE = 1 / 8
"""Largest share of the GPU's memory for both slots: the rest is for the trainer and the
engines."""
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


def arena_on_gpu(config: Config, *, gpus: int, gpu_bytes: int) -> bool:
    """Whether the arena is on a GPU, on a machine with `gpus` GPUs, the smallest with
    `gpu_bytes` of memory.

    With several GPUs 'auto' is host memory: the first rank's GPU would hold both slots
    of the whole model, and every other rank and engine a CUDA context on it.
    """
    settings = config.weights
    if not isinstance(settings, ArenaWeights):
        return False
    if settings.arena_device != "auto":
        return settings.arena_device == "cuda"
    shares_gpu = gpus == 1 and not config.trains_alone
    if not shares_gpu or settings.arena_mode != "copy":
        return False
    folder = config.model.folder
    num_parameters = ModelSize.of(folder, read_hf_config(folder)).total
    return (
        2 * num_parameters * _ITEM_BYTES[config.engine.dtype]
        <= _LARGEST_SHARE * gpu_bytes
    )


def broadcast_on_gpu(config: Config, plan: GpuPlan | None) -> bool:
    """Whether the transport `collective` sends from GPU to GPU, by NCCL, which refuses
    two of its processes on the same one. The GPU of an engine on another machine is
    unknown."""
    is_broadcast = isinstance(config.weights, CollectiveWeights)
    elsewhere = (
        config.engine.external_engines or config.engine_nodes or config.rank_nodes
    )
    if not is_broadcast or plan is None or elsewhere:
        return False
    return not plan.shares
