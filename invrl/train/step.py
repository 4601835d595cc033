"""One training step: old and reference log-probs, then an optimizer step per mini-batch.

Three policies: *rollout* (the engine's log-probs, in the batch), *old* (the proximal policy: this
model before the batch's first step, or the engine's), *current*. With one optimizer step per batch old
and current are the same numbers, so no forward pass is spent on old. Imported after
`device.prepare()`, called by `rank.py`."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.losses import LossInputs, policy_loss
from invrl.errors import TrainError
from invrl.interfaces import StepResult
from invrl.metrics import Max, Mean, Metric, Sum, merge, timed
from invrl.train import device
from invrl.train.config import TrainConfig
from invrl.train.grammar_masks import GrammarMasks
from invrl.train.model import PolicyModel
from invrl.train.optimizer import apply_gradients
from invrl.train.packing import MicroBatch, Row, Shard, pack
from invrl.types import TrainBatch

_Work = tuple[MicroBatch, "partial[LossInputs]"]
"""A micro-batch with what its loss takes besides the current log-probs and their entropy."""
_Packed = list[list[MicroBatch]]
_Recomputed = list[list[NDArray[np.float32]] | None]
"""Log-probs under another policy, per mini-batch, per sample; None: not needed."""


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the phase's seconds, until the device has done its work."""
    with timed(seconds, phase):
        yield
        if device.on_cuda():
            torch.cuda.synchronize()


@dataclass(slots=True, eq=False)
class TrainStep:
    """The model, its optimizer and the frozen reference of one rank, and how a batch is trained."""

    model: DistributedDataParallel
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    reference: PolicyModel | None
    _: KW_ONLY
    train: TrainConfig
    algorithm: AlgorithmConfig
    masks: GrammarMasks

    def run(self, shard: Shard) -> StepResult:
        """One optimizer step per mini-batch. A mini-batch whose gradient is exactly 0 (no advantage, no KL
        term) makes none: neither the weights nor Adam's moments nor the schedule move. Raises TrainError for
        a loss or gradient that is not finite; the mini-batch it is found in changes no weight."""
        started, seconds = time.monotonic(), dict[str, float]()
        packed = [self.pack(self.masks.rows(mini_batch.samples)) for mini_batch in shard]
        old = self._old_logprobs(shard, seconds)
        reference: _Recomputed = [None] * len(packed)
        if (frozen := self.reference) is not None:
            with _timed(seconds, "reference"):
                reference = [self.logprobs(self.masks.rows(mini.samples), frozen) for mini in shard]
        metrics: dict[str, Metric] = {}
        optimizer_steps = 0
        for at, (mini_batch, micro_batches) in enumerate(zip(shard, packed, strict=True)):
            works = [_work(mini_batch, micro_batch, old[at], reference[at]) for micro_batch in micro_batches]
            with _timed(seconds, "forward_backward"):
                parts = self._forward_backward(works)
            rate = float(self.optimizer.param_groups[0]["lr"])
            with _timed(seconds, "optimizer"):
                norm = apply_gradients(self.optimizer)
                if norm > 0.0:
                    self.schedule.step(1)
                    optimizer_steps += 1
            metrics = merge([metrics, *parts, {"grad_norm": Mean(norm), "lr": Mean(rate)}])
        metrics |= _amounts(shard, packed, time.monotonic() - started)
        metrics["optimizer_steps"] = Max(optimizer_steps)  # the same on every rank
        metrics["skipped_steps"] = Max(len(packed) - optimizer_steps)
        return StepResult(optimizer_steps=optimizer_steps, metrics=metrics, seconds=seconds)

    def pack(self, rows: Sequence[Row]) -> list[MicroBatch]:
        return pack(
            rows,
            max_tokens=self.train.max_tokens_per_microbatch,
            max_projections=self.train.max_trained_tokens_per_microbatch,
            share_prefixes=self.train.share_prefixes,
        )

    def logprobs(self, rows: list[Row], model: torch.nn.Module | None = None) -> list[NDArray[np.float32]]:
        """Log-probs by a forward pass of `model` (None: the current one): one array [T] per row, 0 for tokens
        that are not wanted."""
        asked = self.model if model is None else model
        arrays = [np.zeros(len(row.tokens_T), np.float32) for row in rows]
        with torch.no_grad():
            for micro_batch in self.pack(rows):
                if micro_batch.rows:
                    micro_batch.place(asked(micro_batch)[0].cpu().numpy(), arrays)
        return arrays

    def _old_logprobs(self, shard: Shard, seconds: dict[str, float]) -> _Recomputed:
        """Log-probs under the old policy, of all mini-batches before the first step changes the model."""
        if self.algorithm.old_logprobs == "engine":
            return [[s.rollout_logprobs_T for s in mini.samples] for mini in shard]
        if len(shard) < 2:
            return [None] * len(shard)
        with _timed(seconds, "old_logprobs"):
            return [self.logprobs(self.masks.rows(mini.samples)) for mini in shard]

    def _forward_backward(self, works: list[_Work]) -> list[dict[str, Metric]]:
        """Gradients of the mini-batch, summed over its micro-batches and reduced over ranks."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(works),
            model=self.model,
            num_microbatches=len(works),
            seq_length=0,
            micro_batch_size=1,
            forward_only=False,
        )

    def _forward_step(self, works: Iterator[_Work], model: torch.nn.Module) -> tuple[Any, Any]:
        micro_batch, inputs = next(works)
        logprobs_N, entropy_N = model(micro_batch)

        def loss(current_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
            """(loss to sum, Megatron's token count, which we do not use, metrics)."""
            outputs = policy_loss(inputs(current_N=current_N, entropy_N=entropy_N), self.algorithm)
            value = float(outputs.loss.detach())
            if not math.isfinite(value):
                raise TrainError(f"the loss is {value}: no weight was changed")
            return outputs.loss, torch.tensor(1, dtype=torch.int), dict(outputs.metrics)

        return logprobs_N, loss


def _work(
    mini_batch: TrainBatch,
    micro_batch: MicroBatch,
    old: list[NDArray[np.float32]] | None,
    reference: list[NDArray[np.float32]] | None,
) -> _Work:
    def picked(arrays: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(micro_batch.pick(arrays)).to(device.device())

    return micro_batch, partial(
        LossInputs,
        rollout_N=picked([sample.rollout_logprobs_T for sample in mini_batch.samples]),
        advantages_N=picked(mini_batch.advantages),
        old_N=None if old is None else picked(old),
        reference_N=None if reference is None else picked(reference),
        denominator=float(mini_batch.total_tokens),
    )


def _amounts(shard: Shard, packed: _Packed, seconds: float) -> dict[str, Metric]:
    """How much this rank computed. Merging the ranks' metrics adds these up."""
    samples = [sample for mini in shard for sample in mini.samples]
    micro_batches = [micro for parts in packed for micro in parts]
    rows = sum(len(sample.tokens_T) for sample in samples)
    return {
        "tokens": Sum(sum(int(sample.loss_mask_T.sum()) for sample in samples)),
        "computed_tokens": Sum(sum(len(micro.tokens_P) for micro in micro_batches)),
        "row_tokens": Sum(rows),
        "projected_tokens": Sum(sum(len(micro.project_U) for micro in micro_batches)),
        "micro_batches": Sum(len(micro_batches)),
        "tokens_per_s": Sum(rows / seconds if seconds else 0.0),
    }
