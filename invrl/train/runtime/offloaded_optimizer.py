"""Adam in main memory: a rank's float32 master weights and both moments are in pinned
memory of the host, and the step is computed there.

    GPU     gradients ─┐                        ┌─► memory of the gradients ─► weights
    host               └─► staging ─► AdamW ────┘
                                      master weights, moments

On the GPU, gradients are summed over ranks, measured and clipped as without offloading.
A step takes the parameters in groups: while the CPU computes one, the gradients of the
next come down. New master weights go up into the memory of their gradients, which
nobody reads again, and are rounded there to the dtype of the model.

Invariant: the arithmetic is that of torch's fused AdamW on a CPU, and the state in a
checkpoint is the same, so a run may turn offloading on and off when it resumes.

On a CPU the same copies are made from memory to memory. Imported after
`device.prepare()`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from invrl.train.runtime import device
from invrl.train.runtime.optimizer_memory import STAGED_GRADIENT_BYTES

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """A rank's share of one parameter."""

    parameter: torch.nn.Parameter
    master: Any
    """Float32 weights in main memory. `decoupled_grad` is their gradient on the GPU, by
    Megatron's name for one that is not where its weights are."""


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """Gradients on their way to main memory."""

    gradients: Sequence[torch.Tensor]
    arrived: torch.cuda.Event


class OffloadedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with its state in main memory."""

    _groups: list[list[_Share]]
    """Shares whose gradients are in main memory together."""
    _staging: Sequence[torch.Tensor]
    """Pinned memory for the gradients of two groups."""
    _num_threads: int
    """Threads of a step on the host."""

    def move(self, num_threads: int) -> None:
        """Move master weights and moments to main memory."""
        self._num_threads = num_threads
        shares = [
            _Share(parameter, self._master(parameter))
            for parameter in self.model_param_group_index_map
        ]
        numel = sum(share.master.numel() for share in shares)
        weights, mean, square = device.host_memory(3 * numel).chunk(3)
        start = 0
        for master in (share.master for share in shares):
            own = slice(start, start + master.numel())
            weights[own].copy_(master.detach())
            master.data = weights[own]
            self.optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": mean[own].zero_(),
                "exp_avg_sq": square[own].zero_(),
            }
            start = own.stop
        self._groups = list(_grouped(shares))
        largest = max(_numel(group) for group in self._groups)
        self._staging = device.host_memory(2 * largest).chunk(2)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Let each share have its gradient where Megatron has summed it."""
        for group in self._groups:
            for share in group:
                own = self._get_model_param_range_map(share.parameter)["param"]
                parameter: Any = share.parameter
                gradient = parameter.main_grad.view(-1)[own.start : own.end]
                share.master.decoupled_grad = gradient.float()

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the gradients that the norm is of, as Megatron chooses them."""
        tensor_group = getattr(self, "tp_group", None)
        masters: list[Any] = list(self.get_parameters())
        return [
            master.decoupled_grad
            for master in masters
            if param_is_not_shared(master)
            and param_is_not_tensor_parallel_duplicate(master, tensor_group)
        ]

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Make a step, and give the new weights to the ranks that share them."""
        arriving = self._fetch(0)
        for number, group in enumerate(self._groups):
            current = arriving
            if number + 1 < len(self._groups):
                arriving = self._fetch(number + 1)
            current.arrived.synchronize()
            for share, gradient in zip(group, current.gradients, strict=True):
                share.master.grad = gradient
            with device.computes_on_host(self._num_threads):
                self.optimizer.step()  # skips parameters without a gradient
            for share in group:
                self._send(share)
        device.wait()  # the host's memory may change from here on
        chunks: list[Any] = self.model_chunks
        for chunk in chunks:
            chunk.start_param_sync()
        return True

    def _fetch(self, number: int) -> _Arriving:
        """Begin to copy the gradients of a group to main memory. Two groups take turns
        in using the same memory."""
        memory = self._staging[number % 2]
        gradients: list[torch.Tensor] = []
        start = 0
        for share in self._groups[number]:
            end = start + share.master.numel()
            gradient = memory[start:end]
            gradient.copy_(share.master.decoupled_grad, non_blocking=True)
            gradients.append(gradient)
            start = end
        arrived = torch.cuda.Event()
        arrived.record()
        return _Arriving(gradients, arrived)

    def _send(self, share: _Share) -> None:
        """Copy new master weights to the model's."""
        master = share.master
        on_device = master.decoupled_grad
        master.grad = None
        master.decoupled_grad = None
        on_device.copy_(master, non_blocking=True)
        self._model_share(share.parameter).copy_(on_device)

    def _master(self, parameter: torch.nn.Parameter) -> Any:
        group_number, place = self.model_param_group_index_map[parameter]
        return self.optimizer.param_groups[group_number]["params"][place]

    def _model_share(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return this rank's share of the weights that the model computes with,
        flat."""
        buffer_number, _, bucket_number = self.model_param_gbuf_map[parameter]
        bucket: Any = self.buffers[buffer_number].buckets[bucket_number]
        own = self._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        return bucket.param_data.view(-1)[own.start : own.end]


def offload(optimizer: ChainedOptimizer, num_threads: int) -> None:
    """Move the state of distributed optimizers to main memory, where `num_threads`
    compute a step."""
    for part in optimizer.chained_optimizers:
        assert isinstance(part, DistributedOptimizer), "other optimizers are refused"
        if not part.is_stub_optimizer and part.get_parameters():
            offloaded: Any = part
            offloaded.__class__ = OffloadedOptimizer
            offloaded.move(num_threads)
    device.free_unused_memory()


def _grouped(shares: Sequence[_Share]) -> Iterator[list[_Share]]:
    """Yield groups of shares whose gradients fit into the staging memory; a larger
    share is a group alone."""
    group: list[_Share] = []
    for share in shares:
        numel = _numel(group) + share.master.numel()
        if group and numel * _FLOAT_BYTES > STAGED_GRADIENT_BYTES:
            yield group
            group = []
        group.append(share)
    yield group


def _numel(shares: Sequence[_Share]) -> int:
    return sum(share.master.numel() for share in shares)
