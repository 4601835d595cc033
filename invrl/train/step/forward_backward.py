"""The loss of a mini-batch in Megatron's schedule: its gradients, or only its metrics.

No number is read from the device before the last micro-batch has been queued, so the
host prepares the next micro-batches while a GPU computes.

Imported after `device.prepare()`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from invrl.algorithms.loss_inputs import LossOutputs
from invrl.algorithms.objectives.objectives import check_outputs
from invrl.interfaces import Objective
from invrl.train.model.nonfinite_steps import on_host
from invrl.train.model.pipeline_schedule import run_schedule
from invrl.train.model.step_progress import StepProgress
from invrl.train.runtime import device
from invrl.train.step.loss_tensors import LossBatch
from invrl.types.metrics import Metric, Sum


@dataclass(slots=True, eq=False)
class LossPass:
    """One pass over the micro-batches of a mini-batch."""

    chunks: Sequence[DistributedDataParallel]
    name: str
    objective: Objective
    records_logprobs: bool
    progress: StepProgress | None = None
    losses: list[float] = field(default_factory=list, init=False)
    """Losses of this rank's micro-batches, once all are computed: their sum over ranks
    is minimized."""
    stopwatch: device.Stopwatch = field(default_factory=device.Stopwatch, init=False)
    """Runs while a loss is computed."""
    _losses: list[torch.Tensor] = field(default_factory=list, init=False)
    """A scalar for each micro-batch, on the device."""
    current: list[torch.Tensor] = field(default_factory=list, init=False)
    """The policy's log-probs [N] of each micro-batch, if they are recorded."""

    @property
    def bad_losses(self) -> list[float]:
        """Losses that are not finite."""
        return [loss for loss in self.losses if not math.isfinite(loss)]

    def gradients(self, work: Sequence[LossBatch]) -> list[dict[str, Metric]]:
        """Add the gradients of a mini-batch, summed over its micro-batches and reduced
        over ranks.

        Returns the metrics of each micro-batch.
        """
        metrics = run_schedule(
            self.chunks,
            [(item.micro_batch, partial(self._loss, item)) for item in work],
            forward_only=False,
            progress=self.progress,
        )
        self.losses = on_host(self._losses)
        return [dict(part) for part in metrics]

    def metrics(self, work: Sequence[LossBatch]) -> list[dict[str, Metric]]:
        """Return the metrics of each micro-batch, without gradient. `loss` is the
        objective's own metric of that name, else its loss."""
        with torch.no_grad():
            outputs: list[LossOutputs] = run_schedule(
                self.chunks,
                [(item.micro_batch, partial(self._evaluate, item)) for item in work],
                forward_only=True,
                progress=self.progress,
            )
        return [{"loss": Sum(float(part.loss)), **part.metrics} for part in outputs]

    def _evaluate(self, item: LossBatch, *outputs: Any) -> LossOutputs:
        return self.objective(item.inputs(*outputs))

    def _loss(
        self, item: LossBatch, current_N: torch.Tensor, *rest: Any
    ) -> LossOutputs:
        if self.records_logprobs:
            self.current.append(current_N.detach())
        with self.stopwatch.running():
            outputs = self._evaluate(item, current_N, *rest)
        check_outputs(self.name, outputs)
        self._losses.append(outputs.loss.detach())
        return outputs
