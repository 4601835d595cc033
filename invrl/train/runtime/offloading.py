"""Memory that a rank needs only while it trains: gradients, master weights and Adam's
moments.

If engines share the GPU, a rank releases it between two training steps. Gradients are
dropped, because every step begins with zeros. Master weights and moments go to pinned
memory of the host and come back unchanged, bit for bit. The weights that the model
computes with stay: engines get them, and the canary is computed with them.

While offloaded, the tensors are those in the host's memory, so a checkpoint is saved
from there. The state of an optimizer with `--optimizer-cpu-offload` is always there. On
a CPU the same copies are made from memory to memory. Imported after `device.prepare()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from invrl.train.runtime import device
from invrl.train.runtime.offloaded_optimizer import OffloadedOptimizer


@dataclass(slots=True, eq=False)
class TrainingMemory:
    """Training memory of a rank. `chunks` and `optimizers` are all of the rank,
    including a critic's."""

    chunks: Sequence[DistributedDataParallel]
    optimizers: Sequence[ChainedOptimizer]
    is_offloaded: bool = False

    def offload(self) -> None:
        """Release the memory to the device. Does nothing if already offloaded."""
        if self.is_offloaded:
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()  # parts of the gradients' memory
        states = list(self._states())
        copies = [device.copy_to_host(state.data) for state in states]
        device.wait()
        for state, copy in zip(states, copies, strict=True):
            state.data = copy
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        self.is_offloaded = True
        del states, copies
        device.free_unused_memory()

    def restore(self) -> None:
        """Take the memory again; gradients are 0. Does nothing if nothing is
        offloaded."""
        if not self.is_offloaded:
            return
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        states = list(self._states())
        copies = [device.copy_to_device(state.data) for state in states]
        device.wait()
        for state, copy in zip(states, copies, strict=True):
            state.data = copy
        self.is_offloaded = False

    def _buffers(self) -> Iterator[Any]:
        """Yield Megatron's buffers, each with the gradients of many parameters."""
        for chunk in self.chunks:
            yield from cast(Any, chunk.buffers)
            yield from cast(Any, chunk.expert_parallel_buffers)

    def _states(self) -> Iterator[torch.Tensor]:
        """Yield master weights that are not the model's own memory, and moments, but
        not the step counts, which are single numbers. What is always in the host's
        memory is left out."""
        model_storages = {
            parameter.untyped_storage().data_ptr()
            for chunk in self.chunks
            for parameter in chunk.parameters()
        }
        for optimizer in self.optimizers:
            for part in optimizer.chained_optimizers:
                if isinstance(part, OffloadedOptimizer):
                    continue
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.untyped_storage().data_ptr() not in model_storages:
                            yield parameter
                        for state in part.optimizer.state.get(parameter, {}).values():
                            if torch.is_tensor(state) and state.dim() > 0:
                                yield state
