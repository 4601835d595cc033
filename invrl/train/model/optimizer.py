"""Megatron's DDP and optimizer around a model: float32 master weights, summed
gradients.

Invariant: a step is applied whole or not at all; a gradient that is not finite changes
no weight. Imported after `device.prepare()`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module, MegatronModule

from invrl.train.config import TrainConfig
from invrl.train.model.policy_model import PolicyModel
from invrl.train.runtime import device
from invrl.train.runtime.megatron_args import MegatronOptions
from invrl.train.runtime.offloaded_optimizer import OffloadedOptimizer, offload
from invrl.train.runtime.offloading import TrainingMemory


class SummedGradients(DistributedDataParallel):
    """Megatron's DDP, which takes less of the host's time for each parameter's gradient
    of a micro-batch, where gradients are reduced after all micro-batches."""

    def _make_backward_post_hook(
        self, param: torch.nn.Parameter
    ) -> Callable[..., None]:
        if self.ddp_config.overlap_grad_reduce:
            return super()._make_backward_post_hook(param)
        parameter: Any = param  # with what Megatron has added to it

        def add_gradient(*_: object) -> None:
            gradient = parameter.grad
            if gradient is not None:
                parameter.main_grad.add_(gradient)
                parameter.grad = None

        return add_gradient


def distribute(
    chunks: Sequence[PolicyModel],
    config: TrainConfig,
    options: MegatronOptions,
    *,
    host_threads: int,
) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Put each chunk of the model behind DDP, whose gradients accumulate in float32,
    and build their optimizer.

    Megatron's DDP and optimizer configurations are set here; the user's `--megatron-*`
    options come last.
    """
    transformer = chunks[0].config
    ddp_fields: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
    }
    ddp_fields |= options.ddp
    optimizer_fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.lr_min,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "clip_grad": config.clip_grad or 0.0,
        "bf16": transformer.bf16,
        "params_dtype": transformer.params_dtype,
        "use_distributed_optimizer": config.use_distributed_optimizer,
    }
    optimizer_fields |= options.optimizer

    ddp_config = DistributedDataParallelConfig(**ddp_fields)
    distributed: list[DistributedDataParallel] = []
    for chunk in chunks:
        wrapped = Float16Module(transformer, chunk) if transformer.bf16 else chunk
        distributed.append(SummedGradients(transformer, ddp_config, wrapped))
    if ddp_config.overlap_grad_reduce:
        # Within these contexts no gradient is reduced; Megatron's schedules leave them
        # for the backward pass of a chunk's last micro-batch.
        contexts: Any = [chunk.no_sync for chunk in distributed]
        transformer.no_sync_func = contexts if len(distributed) > 1 else contexts[0]
    optimizer = _make_optimizer(
        distributed,
        OptimizerConfig(**optimizer_fields),
        host_threads=host_threads if config.optimizer_cpu_offload else None,
    )
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = partial(_sum_gradients)
    return distributed, optimizer


def _make_optimizer(
    chunks: list[DistributedDataParallel],
    config: OptimizerConfig,
    *,
    host_threads: int | None,
) -> ChainedOptimizer:
    """Make the optimizer. With `host_threads` its state is in main memory, and they
    compute its steps. Megatron makes master weights on the GPU, so for that time
    gradients leave them their memory."""
    gradients = TrainingMemory(chunks, optimizers=())
    if host_threads is not None:
        gradients.offload()
    optimizer = get_megatron_optimizer(config, cast(list[MegatronModule], chunks))
    parts = [optimizer]
    if isinstance(optimizer, ChainedOptimizer):
        parts = optimizer.chained_optimizers
    # Megatron adds one without parameters where all ranks train experts only.
    optimizer = ChainedOptimizer([part for part in parts if part.optimizer is not None])
    device.fuse_adam(optimizer)
    if host_threads is not None:
        offload(optimizer, host_threads)
    gradients.restore()
    return optimizer


def make_schedule(
    optimizer: ChainedOptimizer, config: TrainConfig
) -> OptimizerParamScheduler:
    """Return Megatron's own learning-rate schedule; call `step(1)` after each optimizer
    step.

    A constant schedule has no end, only its warm-up. Step k of a warm-up of W steps has
    k / (W + 1) of the rate, so no step has a rate of 0, which would waste a batch.
    """
    decay_steps = config.lr_decay_steps
    if decay_steps is None or config.lr_decay_style == "constant":
        decay_steps = config.lr_warmup_steps + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (config.lr_warmup_steps + 1),
        max_lr=config.lr,
        min_lr=config.lr_min,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def _sum_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **rest: Any
) -> None:
    """Reduce over ranks without dividing: each loss has its global denominator
    already."""
    finalize_model_grads(model, None, **rest)


def apply_gradients(optimizer: ChainedOptimizer) -> float:
    """Clip the gradient and make a step; return the gradient's norm before clipping,
    over all ranks.

    A gradient that is not finite makes no step. Neither does one of exactly 0: Adam's
    momentum and the weight decay would move the weights without any signal from the
    batch.
    """
    with torch.no_grad():
        if optimizer.prepare_grads():  # it overflowed its loss scale
            return math.inf
        norm = float(optimizer.get_grad_norm() or 0.0)
        if norm == 0.0 or not math.isfinite(norm):
            return norm
        for part in optimizer.chained_optimizers:
            max_norm = part.config.clip_grad
            parameters: list[torch.Tensor] = list(part.get_parameters())
            if parameters and max_norm > 0:
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm,
                    norm,
                    use_decoupled_grad=isinstance(part, OffloadedOptimizer),
                )
        optimizer.step_with_ready_grads()
    return norm


def forget_moments(optimizer: ChainedOptimizer) -> None:
    """Reset Adam's moments and step counts to those before its first step. Weights and
    learning rates stay."""
    for part in optimizer.chained_optimizers:
        adam = cast(torch.optim.Optimizer, part.optimizer)
        for group in adam.param_groups:
            if "step" in group:  # a fused optimizer counts here
                group["step"] = (
                    torch.zeros_like(group["step"])
                    if torch.is_tensor(group["step"])
                    else 0
                )
        for state in adam.state.values():
            for tensor in state.values():
                if torch.is_tensor(tensor):  # the moments, and torch's own step count
                    tensor.zero_()
