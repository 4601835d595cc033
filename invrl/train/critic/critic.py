"""The critic of one rank: a second model with a separate optimizer, on the policy's
ranks or on others (`critic_rank.py`).

It computes the values of a batch before the batch's first optimizer step, and learns
the returns in one optimizer step per mini-batch, in the micro-batches of the policy.
Imported after `device.prepare()`.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from numpy.typing import NDArray

from invrl.algorithms.loss_inputs import LossOutputs
from invrl.algorithms.policy_loss.value_loss import value_loss
from invrl.algorithms.tables import CriticConfig
from invrl.families.model_config import HuggingFaceConfig
from invrl.train.config import TrainConfig
from invrl.train.critic.critic_model import CriticModel, critic_shape
from invrl.train.model.nonfinite_steps import nonfinite
from invrl.train.model.optimizer import apply_gradients, distribute, make_schedule
from invrl.train.model.pipeline_schedule import (
    Packed,
    SampleNumbers,
    Work,
    forward_pass,
    run_schedule,
)
from invrl.train.model.policy_model import build_model
from invrl.train.parallel.process_group import any_rank
from invrl.train.rank_settings import RankSettings
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.train.runtime.megatron_args import MegatronOptions
from invrl.types.metrics import Mean, Metric, merge


def critic_settings(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """Return the policy's settings with the critic's learning rate, warm-up and
    gradient bound."""
    return train.model_copy(
        update={
            "lr": critic.lr,
            "lr_min": 0.0,
            "lr_warmup_steps": critic.lr_warmup_steps,
            "lr_decay_style": "constant",
            "lr_decay_steps": None,
            "clip_grad": critic.clip_grad,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Targets of the critic for a mini-batch: one array [T] per sample."""

    old: Sequence[NDArray[np.float32]]
    """Values before the batch's first optimizer step."""
    returns: Sequence[NDArray[np.float32]]
    tokens: float
    """Trained tokens of the whole mini-batch, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticStep:
    """Result of an optimizer step of the critic."""

    grad_norm: float
    """0 or not finite: no step was made."""
    bad_losses: list[float]
    """Losses on this rank that are not finite."""
    metrics: dict[str, Metric]


@dataclass(slots=True, eq=False)
class Critic:
    """Values and value steps of one rank."""

    models: Sequence[CriticModel]
    chunks: Sequence[DistributedDataParallel]
    """The same, behind Megatron's DDP."""
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    _: KW_ONLY
    value_clip: float
    warmup_batches: int
    """Number of first batches in which only the critic learns."""
    batches: int = 0
    """Batches trained since the beginning of the run; saved with the weights."""

    @property
    def learns_alone(self) -> bool:
        """Whether the next batch is part of the warm-up."""
        return self.batches < self.warmup_batches

    def values(self, packed: Sequence[Packed]) -> list[SampleNumbers]:
        """Return the values of the wanted tokens of each part, under the current
        critic, 0 elsewhere. All 0 on a pipeline stage that is not the last."""
        return forward_pass(self.chunks, packed)

    def step(self, packed: Packed, targets: Targets) -> CriticStep:
        """Make one optimizer step on a mini-batch. All ranks call it together. A loss
        that is not finite, on any rank, or such a gradient changes nothing."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []

        def loss(
            old_N: torch.Tensor,
            returns_N: torch.Tensor,
            values_N: torch.Tensor,
            *_: Any,
        ) -> LossOutputs:
            outputs = value_loss(
                values_N,
                old_N,
                returns_N,
                clip=self.value_clip,
                tokens=targets.tokens,
            )
            losses.append(outputs.loss.detach())
            return outputs

        work: list[Work] = []
        for micro_batch in packed.micro_batches:
            old_N = to_device(micro_batch.pick(targets.old), device.device())
            returns_N = to_device(micro_batch.pick(targets.returns), device.device())
            work.append((micro_batch, partial(loss, old_N, returns_N)))
        loss_metrics = run_schedule(self.chunks, work, forward_only=False)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        bad_losses = nonfinite(losses)
        grad_norm = math.nan
        if not any_rank(bool(bad_losses)):
            grad_norm = apply_gradients(self.optimizer)
        if not math.isfinite(grad_norm):
            return CriticStep(grad_norm=grad_norm, bad_losses=bad_losses, metrics={})
        if grad_norm > 0.0:
            self.schedule.step(1)
        step_metrics = {
            "critic_grad_norm": Mean(grad_norm),
            "critic_lr": Mean(learning_rate),
        }
        return CriticStep(
            grad_norm=grad_norm,
            bad_losses=[],
            metrics=merge([*loss_metrics, step_metrics]),
        )


def make_critic(
    settings: RankSettings, config: HuggingFaceConfig, options: MegatronOptions
) -> Critic:
    """Build the critic over a rank's chunks of its own model, with their optimizer.
    `config` is the policy's."""
    critic = settings.algorithm.critic or CriticConfig.model_validate({})
    train = critic_settings(settings.train, critic)
    chunks = build_model(
        CriticModel,
        critic_shape(config),
        settings.critic_path or settings.model_path,
        getattr(torch, train.train_dtype),
        settings.layout,
        options.transformer,
    )
    distributed, optimizer = distribute(
        chunks, train, options, host_threads=settings.host_threads
    )
    return Critic(
        chunks,
        distributed,
        optimizer,
        make_schedule(optimizer, train),
        value_clip=critic.value_clip or 0.0,
        warmup_batches=critic.warmup_steps,
    )
