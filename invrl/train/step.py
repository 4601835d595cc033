"""One training step: values, old and reference log-probs, then one optimizer step per mini-batch.

With a critic, its values of the whole batch come first, and the advantages are computed from them. Each
mini-batch is then an optimizer step of the critic, and one of the policy unless the critic still learns
alone.

Micro-batches go through the chunks of the model in Megatron's schedule, whatever the layout. Every rank of a
replica packs the same micro-batches; only the last pipeline stage has log-probs, losses and their metrics.

There are three policies: *rollout* (the engine's log-probs, in the batch), *old* (this model before the
batch's first optimizer step), and *current*. In the first optimizer step of a batch old and current are the
same numbers, so no forward pass is spent on old there. Old and reference log-probs are computed if the
objective needs them, in the micro-batches that are then trained, each in one pass over all mini-batches. An
objective that compares rows costs one more forward pass per mini-batch (`row_table.py`).
Imported after `device.prepare()`.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from numpy.typing import NDArray

from invrl.algorithms.adaptive import Coefficients
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Rows, TopTokens
from invrl.algorithms.objectives import (
    TEACHER_COLUMN,
    check_outputs,
    coupling_of,
    needs_of,
    objective_of,
)
from invrl.algorithms.old_policy import STALENESS
from invrl.algorithms.row_table import RowTable
from invrl.errors import TrainError
from invrl.interfaces import Objective, StepResult, TokenRecord
from invrl.metrics import Max, Mean, Metric, Sum, merge, timed
from invrl.top_logprobs import NO_TOKEN, TopLogprobs
from invrl.train import device
from invrl.train.config import TrainConfig
from invrl.train.credit_from_values import credit
from invrl.train.critic import Critic, Targets
from invrl.train.expert_load import ExpertRouters
from invrl.train.grammar_masks import GrammarMasks
from invrl.train.micro_batch import MicroBatch, Row
from invrl.train.model_size import ComputeCost
from invrl.train.nonfinite_steps import NonfiniteSteps
from invrl.train.optimizer import apply_gradients, forget_moments
from invrl.train.parallel.layout import ParallelLayout
from invrl.train.process_group import any_rank, gather_rows, means_of_ranks
from invrl.train.reference import FrozenReference
from invrl.train.rollout_kl import with_rollout_kl
from invrl.train.routing_replay import RoutingRecorder
from invrl.train.schedule import (
    Packed,
    SampleNumbers,
    forward_pass,
    micro_batches_of,
    pack_rows,
    run_schedule,
)
from invrl.train.sharding import Shard
from invrl.train.spanning_turns import sampled_after_update
from invrl.train.step_place import StepProgress
from invrl.types import TrainBatch

_WITHOUT_CANDIDATES = (
    "the objective reads the likeliest tokens in the place of each trained one, and no row of the batch has "
    "them: sample it with --rollout-top-logprobs, or train with another --policy-loss"
)


@dataclass(frozen=True, slots=True, eq=False)
class _LossWork:
    """A micro-batch, and everything that its loss needs besides the current policy's numbers."""

    micro_batch: MicroBatch
    loss_inputs: "partial[LossInputs]"
    """Lacks `current_N`, `entropy_N` and `top`."""
    top: "partial[TopTokens] | None"
    """Lacks `current_NK`. None: the objective does not need them."""

    def inputs(
        self, current_N: torch.Tensor, entropy_N: torch.Tensor, current_NK: torch.Tensor | None = None
    ) -> LossInputs:
        """The model's outputs; `current_NK` None: the micro-batch has no candidates."""
        top = None
        if self.top is not None:
            if current_NK is None:
                current_NK = self.top.keywords["rollout_NK"]  # minus infinity, as under any policy
            top = self.top(current_NK=current_NK)
        return self.loss_inputs(current_N=current_N, entropy_N=entropy_N, top=top)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A batch before its first optimizer step, by mini-batch: what is computed of it without the critic."""

    shard: Shard
    packed: list[Packed]
    reference: Sequence[SampleNumbers | None]
    teacher: Sequence[SampleNumbers | None]
    old: Sequence[SampleNumbers | None]
    """Log-probs that the loss reads."""
    before: Sequence[SampleNumbers]
    """Log-probs that rewards and targets read; empty where they are not computed here."""
    started: float
    """`time.monotonic()`"""
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """A batch as the critic sees it."""

    shard: Shard
    """With the advantages that are to be trained."""
    targets: Sequence[Targets | None]
    """What the critic learns, by mini-batch; None without a critic."""
    metrics: Mapping[str, Metric]


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the seconds of the phase, until the device has finished its work."""
    with timed(seconds, phase):
        yield
        if device.on_cuda():
            torch.cuda.synchronize()


@dataclass(slots=True, eq=False)
class TrainStep:
    """Trains a batch with the model, the optimizer and the frozen models of one rank."""

    chunks: Sequence[DistributedDataParallel]
    """This rank's part of the model: one chunk, or several with virtual pipeline stages."""
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    reference: FrozenReference | None
    teacher: FrozenReference | None
    """None: the objective needs none, or the rows have the teacher's log-probs already."""
    _: KW_ONLY
    layout: ParallelLayout
    train: TrainConfig
    algorithm: AlgorithmConfig
    cost: ComputeCost
    masks: GrammarMasks
    critic: Critic | None = None
    """None: the objective needs no values."""
    routing: RoutingRecorder | None
    """Where the experts of the pass for the old log-probs are recorded. None: no routing is replayed."""
    expert_routers: ExpertRouters | None
    """None: no layer has experts."""
    coefficients: Coefficients = field(init=False)
    """As the batches so far have adapted them."""
    progress: StepProgress = field(default_factory=StepProgress, init=False)
    """What is computed now. It may be read by other threads."""
    _objective: Objective = field(init=False)
    _bad_losses: list[float] = field(default_factory=list, init=False)
    """Losses of the mini-batch on this rank that are not finite."""
    _loss_seconds: float = field(default=0.0, init=False)
    """Spent on the losses of the mini-batch."""
    _current: list[torch.Tensor] = field(default_factory=list, init=False)
    """The policy's log-probs [N] of each micro-batch of the mini-batch, if they are recorded."""
    _nonfinite: NonfiniteSteps = field(init=False)

    def __post_init__(self) -> None:
        self.coefficients = Coefficients.of(self.algorithm)
        self._objective = objective_of(self.algorithm)
        self._nonfinite = NonfiniteSteps(self.train.max_nonfinite_steps)

    def run(self, shard: Shard) -> StepResult:
        """One optimizer step per mini-batch.

        Raises TrainError where the objective reads the likeliest tokens and no row has them.

        A mini-batch whose gradient is exactly 0 (no advantage, no KL term) makes no step: neither the weights
        nor Adam's moments nor the schedule change. Nor does one whose loss, on any rank, or whose gradient is
        not finite; its numbers are left out of the metrics. Raises TrainError at the last of
        `max_nonfinite_steps` of these in a row.
        """
        prepared = self.prepare(shard)
        values = None
        if self.critic is not None and prepared.packed:
            self.progress.begin("values of the critic")
            with _timed(prepared.seconds, "values"):
                values = self.critic.values(prepared.packed)
        judged = self.judge(prepared, values)
        learns_alone = self.critic is not None and self.critic.learns_alone
        return self.learn(prepared, judged, critic_learns_alone=learns_alone)

    def prepare(self, shard: Shard) -> Prepared:
        """The log-probs that the objective needs of a batch, before its first optimizer step."""
        started = time.monotonic()
        seconds: dict[str, float] = {}
        self._objective = objective_of(self.coefficients.within(self.algorithm))
        self._check_candidates(shard)
        with timed(seconds, "objective"):
            packed = [self._pack(self.masks.rows(mini_batch.samples)) for mini_batch in shard]
        reference = self._frozen_logprobs(self.reference, "reference", packed, seconds)
        teacher = self._frozen_logprobs(self.teacher, "teacher", packed, seconds)
        old_by_step = self._old_logprobs(shard, packed, seconds)
        before: list[SampleNumbers] = []
        algorithm = self.algorithm
        if needs_of(algorithm).values or algorithm.token_level or algorithm.kl_in_rollout_rewards:
            for mini_batch, part, old in zip(shard, packed, old_by_step, strict=True):
                if old is None:
                    old = self._logprobs_before(mini_batch, part, seconds)
                before.append(old)
        return Prepared(
            shard=shard,
            packed=packed,
            reference=reference,
            teacher=teacher,
            old=old_by_step,
            before=before,
            started=started,
            seconds=seconds,
        )

    def learn(self, prepared: Prepared, judged: Judged, *, critic_learns_alone: bool) -> StepResult:
        """The optimizer steps of `run`: of a critic on these ranks, and of the policy, which makes none where
        the critic learns alone."""
        seconds = prepared.seconds
        packed = prepared.packed
        metrics: dict[str, Metric] = dict(judged.metrics)
        optimizer_steps = 0
        critic_steps = 0
        skipped_steps = 0
        nonfinite_steps = 0
        token_records: list[TokenRecord | None] = []
        for mini_batch, packed_rows, old, reference, teacher, targets in zip(
            judged.shard,
            packed,
            prepared.old,
            prepared.reference,
            prepared.teacher,
            judged.targets,
            strict=True,
        ):
            self.progress.next_mini_batch(len(packed))
            if self.critic is not None:
                assert targets is not None, "the critic has judged the batch"
                self.progress.begin("gradients of the critic")
                with _timed(seconds, "critic"):
                    critic_step = self.critic.step(packed_rows, targets)
                if not math.isfinite(critic_step.grad_norm):
                    nonfinite_steps += 1
                    token_records += [None] * len(mini_batch.samples)
                    self._nonfinite.count(mini_batch, critic_step.grad_norm, critic_step.bad_losses)
                    continue
                critic_steps += critic_step.grad_norm > 0.0
                metrics = merge([metrics, critic_step.metrics])
            if critic_learns_alone:
                token_records += [None] * len(mini_batch.samples)
                self._nonfinite.end()
                continue
            numbers = self._row_numbers(mini_batch, packed_rows, reference, seconds)
            with timed(seconds, "objective"):
                work = self._loss_work(
                    mini_batch, packed_rows, old, reference, numbers, teacher=teacher, targets=targets
                )
            learning_rate = float(self.optimizer.param_groups[0]["lr"])
            grad_norm, loss_metrics = self._update(work, seconds)
            token_records += self._token_records(mini_batch, packed_rows, old)
            if not math.isfinite(grad_norm):
                nonfinite_steps += 1
                self._nonfinite.count(mini_batch, grad_norm, self._bad_losses)
                continue
            self._nonfinite.end()
            if grad_norm > 0.0:
                self.schedule.step(1)
                optimizer_steps += 1
            else:
                skipped_steps += 1
            step_metrics = {"grad_norm": Mean(grad_norm), "lr": Mean(learning_rate)}
            expert_metrics = self._expert_metrics(balance=grad_norm > 0.0)
            metrics = merge([metrics, *loss_metrics, step_metrics, expert_metrics])
        self.progress.end()
        metrics |= self._adapt(metrics)
        self._move_reference(prepared.shard)
        if self.critic is not None:
            self.critic.batches += 1
            metrics["critic_steps"] = Max(critic_steps)
        metrics |= self._routing_metrics(packed)
        metrics |= _work_amounts(prepared.shard, packed, time.monotonic() - prepared.started)
        # Max, because these are the same on every rank.
        metrics["optimizer_steps"] = Max(optimizer_steps)
        metrics["skipped_steps"] = Max(skipped_steps)
        metrics["nonfinite_steps"] = Max(nonfinite_steps)
        return StepResult(
            optimizer_steps=optimizer_steps,
            nonfinite_steps=nonfinite_steps,
            metrics=metrics,
            seconds=seconds,
            token_records=tuple(token_records) if self.train.record_trained_tokens else (),
        )

    def _token_records(
        self, mini_batch: TrainBatch, packed: Packed, old: SampleNumbers | None
    ) -> list[TokenRecord]:
        """One for each sample of a mini-batch whose gradient was computed. None at all where nothing is to be
        recorded, and on a pipeline stage that has no log-probs."""
        if not self._current:
            return []
        logprobs = old
        if logprobs is None:
            logprobs = [np.zeros(len(row.tokens_T), np.float32) for row in packed.rows]
            for micro_batch, current_N in zip(packed.micro_batches, self._current, strict=True):
                micro_batch.place(current_N.float().cpu().numpy(), logprobs)
        records: list[TokenRecord] = []
        for sample, advantages_T, logprobs_T in zip(
            mini_batch.samples, mini_batch.advantages, logprobs, strict=True
        ):
            is_trained_T = sample.loss_mask_T
            records.append(
                TokenRecord(advantages_N=advantages_T[is_trained_T], logprobs_N=logprobs_T[is_trained_T])
            )
        return records

    def _update(
        self, work: list[_LossWork], seconds: dict[str, float]
    ) -> tuple[float, list[dict[str, Metric]]]:
        """The optimizer's step on a mini-batch. Returns the norm of its gradient, and the metrics of each
        micro-batch. With a norm of 0, or one that is not finite, no weight has changed."""
        self.progress.begin("gradients")
        with _timed(seconds, "forward_backward"):
            loss_metrics = self._forward_backward(work)
        seconds["forward_backward"] -= self._loss_seconds
        seconds["objective"] += self._loss_seconds
        grad_norm = math.nan
        self.progress.begin("optimizer step")
        with _timed(seconds, "optimizer"):
            if not any_rank(bool(self._bad_losses)):
                grad_norm = apply_gradients(self.optimizer)
        return grad_norm, loss_metrics

    def evaluate(self, shard: Shard) -> dict[str, Metric]:
        """The objective's metrics of rows that are not trained: no weight and no state changes. `loss` is the
        objective's own metric of that name, and its loss where it has none. Nothing on a pipeline stage that
        is not the last."""
        seconds: dict[str, float] = {}
        packed = [self._pack(self.masks.rows(mini_batch.samples)) for mini_batch in shard]
        reference_by_part = self._frozen_logprobs(self.reference, "reference", packed, seconds)
        measured: list[dict[str, Metric]] = []
        for mini_batch, packed_rows, reference in zip(shard, packed, reference_by_part, strict=True):
            numbers = self._row_numbers(mini_batch, packed_rows, reference, seconds)
            work = self._loss_work(mini_batch, packed_rows, None, reference, numbers)
            with torch.no_grad():
                self.progress.begin("held-out rows")
                measured += run_schedule(
                    self.chunks, self._evaluation_step, work, forward_only=True, progress=self.progress
                )
        self.progress.end()
        return merge(measured)

    def _adapt(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Adapts the coefficients to the batch, on all ranks together. Returns those that acted in it, where
        they are adapted at all."""
        algorithm = self.algorithm
        before = self.coefficients
        acted: dict[str, Metric] = {}
        if algorithm.kl_target:
            acted["kl_coef"] = Max(before.kl)
        if algorithm.entropy_target or algorithm.entropy_ceiling:
            acted["entropy_coef"] = Max(before.within(algorithm).entropy_coef)
        if not acted:
            return {}
        nothing = Mean(0.0, 0)
        measured = [metrics.get(name, nothing) for name in ("kl_reference", "entropy")]
        means = [metric for metric in measured if isinstance(metric, Mean)]
        divergence, entropy = means_of_ranks(
            [mean.total for mean in means], [float(mean.weight) for mean in means]
        )
        if not math.isnan(entropy):  # no step of the batch was finite
            self.coefficients = before.after(algorithm, divergence, entropy)
        return acted

    def _move_reference(self, shard: Shard) -> None:
        """Lets the reference follow the policy, where the settings say so. A version is a batch, and the
        batch's own is that of the weights before it."""
        if self.reference is None or not shard:
            return
        interval = self.algorithm.reference_reset_steps
        if interval and (shard[0].version + 1) % interval == 0:
            self.reference.follow(1.0)
            if self.algorithm.reference_reset_optimizer:
                forget_moments(self.optimizer)
        if self.algorithm.reference_ema:
            self.reference.follow(1.0 - self.algorithm.reference_ema)

    def _expert_metrics(self, *, balance: bool) -> dict[str, Metric]:
        """How the mini-batch's tokens were spread over the experts. `balance`: then the routers' biases make
        their step, too."""
        if self.expert_routers is None:
            return {}
        load = self.expert_routers.load()
        if balance:
            self.expert_routers.balance(load)
        return load.metrics()

    def _check_candidates(self, shard: Shard) -> None:
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        if not samples or not needs_of(self.algorithm).top_logprobs:
            return
        if all(sample.top_logprobs is None for sample in samples):
            raise TrainError(_WITHOUT_CANDIDATES)

    def _pack(self, rows: Sequence[Row]) -> Packed:
        """Raises TrainError for rows whose experts are to be replayed and are not those of this model."""
        if self.routing is not None and self.train.routing_replay == "engine":
            self.routing.check(rows)
        else:
            rows = [replace(row, experts_TLK=None) for row in rows]
        if not needs_of(self.algorithm).top_logprobs:
            rows = [replace(row, candidates_NK=None) for row in rows]
        return pack_rows(rows, train=self.train, layout=self.layout, cost=self.cost)

    def logprobs(self, rows: Sequence[Row]) -> SampleNumbers:
        """Log-probs under the current policy: one array [T] per row, 0 for tokens that are not wanted. All 0
        on a pipeline stage that is not the last."""
        [logprobs] = self._forward([self._pack(rows)], "log-probs")
        return logprobs

    def _forward(self, packed: Sequence[Packed], work: str) -> list[SampleNumbers]:
        """One forward pass of the model over all these rows, as it is now: what `logprobs` returns, for each
        part. `work`: its name in `progress`."""
        self.progress.begin(work)
        logprobs = forward_pass(self.chunks, packed, self.progress)
        self.progress.end_pass()
        return logprobs

    def _old_logprobs(
        self, shard: Shard, packed: list[Packed], seconds: dict[str, float]
    ) -> Sequence[SampleNumbers | None]:
        """Log-probs under the old policy, per mini-batch, computed before the first optimizer step changes
        the model. None for the first mini-batch, where they equal the current ones, and where the objective
        does not need them.

        With routing replay of the trainer, the micro-batches of `packed` get the experts that this pass
        chooses.
        """
        if len(shard) < 2 or not needs_of(self.algorithm).old:
            return [None] * len(shard)
        with _timed(seconds, "old_logprobs"):
            if self.routing is None or self.train.routing_replay != "trainer":
                return [None, *self._forward(packed[1:], "old log-probs")]
            with self.routing.recording():
                old_by_step = self._forward(packed[1:], "old log-probs")
            routed = iter(self.routing.with_recorded(micro_batches_of(packed[1:])))
            for index in range(1, len(packed)):
                part = packed[index]
                packed[index] = Packed(part.rows, list(islice(routed, len(part.micro_batches))))
            return [None, *old_by_step]

    def _frozen_logprobs(
        self,
        frozen: FrozenReference | None,
        phase: str,
        packed: Sequence[Packed],
        seconds: dict[str, float],
    ) -> Sequence[SampleNumbers | None]:
        """Log-probs under a frozen model, per mini-batch; None without one. Its routers choose the
        experts."""
        if frozen is None or not packed:
            return [None] * len(packed)
        unrouted: list[Packed] = []
        for part in packed:
            micro_batches = [replace(micro_batch, experts_PLK=None) for micro_batch in part.micro_batches]
            unrouted.append(Packed(part.rows, micro_batches))
        with _timed(seconds, phase), frozen.in_place():
            return [*self._forward(unrouted, f"log-probs of the {phase}")]

    def judge(self, prepared: Prepared, values: Sequence[SampleNumbers] | None) -> Judged:
        """Advantages and the critic's targets, before the batch's first optimizer step. `values`: the
        critic's, by mini-batch; None without a critic. The batch stays as it is where its advantages were
        computed when it was taken."""
        shard = prepared.shard
        no_targets = [None] * len(shard)
        algorithm = self.algorithm
        is_given = values is None and not algorithm.token_level and not algorithm.kl_in_rollout_rewards
        if is_given or not prepared.packed:
            return Judged(shard=shard, targets=no_targets, metrics={})
        if algorithm.kl_in_rollout_rewards:
            with timed(prepared.seconds, "objective"):
                with_kl, metrics = with_rollout_kl(
                    shard,
                    old=prepared.before,
                    reference=prepared.reference,
                    config=self.coefficients.within(algorithm),
                )
            return Judged(shard=with_kl, targets=no_targets, metrics=metrics)
        with timed(prepared.seconds, "objective"):
            judged = credit(
                shard, values, old=prepared.before, reference=prepared.reference, config=self.algorithm
            )
        if values is None:
            return Judged(shard=judged.shard, targets=no_targets, metrics=judged.metrics)
        targets = [
            Targets(old=values_of_step, returns=returns, tokens=mini_batch.trained.tokens)
            for mini_batch, values_of_step, returns in zip(shard, values, judged.returns, strict=True)
        ]
        return Judged(shard=judged.shard, targets=targets, metrics=judged.metrics)

    def _logprobs_before(
        self, mini_batch: TrainBatch, packed: Packed, seconds: dict[str, float]
    ) -> SampleNumbers:
        """Log-probs under the old policy of a mini-batch whose loss does without them: the engine's, where
        they are not recomputed, or where rewards and targets do not depend on them."""
        algorithm = self.algorithm
        with_kl = algorithm.kl_in_token_rewards or algorithm.kl_in_rollout_rewards
        is_read = with_kl or algorithm.value_targets == "vtrace"
        if not is_read or algorithm.old_logprobs != "recompute":
            return [sample.rollout_logprobs_T for sample in mini_batch.samples]
        with _timed(seconds, "old_logprobs"):
            [logprobs] = self._forward([packed], "old log-probs")
        return logprobs

    def _loss_work(
        self,
        mini_batch: TrainBatch,
        packed: Packed,
        old: SampleNumbers | None,
        reference: SampleNumbers | None,
        numbers: Sequence[Mapping[str, float]],
        *,
        teacher: SampleNumbers | None = None,
        targets: Targets | None = None,
    ) -> list[_LossWork]:
        """One for each micro-batch."""
        with_staleness = self.algorithm.old_logprobs == "interpolated"
        with_top = needs_of(self.algorithm).top_logprobs
        return [
            _loss_work(
                mini_batch,
                micro_batch,
                old,
                reference,
                numbers,
                teacher=teacher,
                targets=targets,
                with_staleness=with_staleness,
                with_top=with_top,
            )
            for micro_batch in packed.micro_batches
        ]

    def _row_numbers(
        self,
        mini_batch: TrainBatch,
        packed: Packed,
        reference: SampleNumbers | None,
        seconds: dict[str, float],
    ) -> list[Mapping[str, float]]:
        """The numbers of each sample: its own, and those that the objective gives a row because of other
        rows."""
        numbers = [sample.numbers for sample in mini_batch.samples]
        if not needs_of(self.algorithm).row_table:
            return numbers
        with _timed(seconds, "row_table"):
            [current] = self._forward([packed], "rows to compare")
            indices = [index for index, sample in enumerate(mini_batch.samples) if sample.loss_mask_T.any()]
            table, first = gather_rows(_row_table(mini_batch, indices, current, reference))
            coupled = coupling_of(self.algorithm.objective, self._objective)(table)
            for place, index in enumerate(indices, start=first):
                self._check_names(coupled, numbers[index])
                of_row = {name: float(values_M[place]) for name, values_M in coupled.items()}
                numbers[index] = {**numbers[index], **of_row}
        return numbers

    def _check_names(self, coupled: Mapping[str, object], given: Mapping[str, float]) -> None:
        """Raises TrainError if the objective's numbers have the name of one that the row already has."""
        taken = sorted(coupled.keys() & given.keys())
        if taken:
            raise TrainError(
                f"the objective {self.algorithm.objective} gives rows the number {taken[0]!r}, which they "
                "have already: name it otherwise in `couple`, or in --extra-columns"
            )

    def _routing_metrics(self, packed: Sequence[Packed]) -> dict[str, Metric]:
        if self.routing is None:
            return {}
        metrics: dict[str, Metric] = {}
        agreement = self.routing.agreement.take()
        if agreement.weight:  # something was replayed
            metrics["routing_agreement"] = agreement
        if self.train.routing_replay == "engine":
            num_tokens = 0
            num_unknown = 0
            for micro_batch in micro_batches_of(packed):
                if micro_batch.rows:
                    num_tokens += len(micro_batch.tokens_P)
                    num_unknown += micro_batch.num_unrecorded
            metrics["routing_unknown"] = Mean(num_unknown, num_tokens)
        return metrics

    def _forward_backward(self, work: list[_LossWork]) -> list[dict[str, Metric]]:
        """Computes the gradients of a mini-batch, summed over its micro-batches and reduced over ranks.

        Returns the metrics of each micro-batch.
        """
        self._bad_losses.clear()
        self._current.clear()
        self._loss_seconds = 0.0
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.expert_routers is not None:
            self.expert_routers.clear()
        return run_schedule(self.chunks, self._forward_step, work, forward_only=False, progress=self.progress)

    def _forward_step(self, work: Iterator[_LossWork], model: torch.nn.Module) -> tuple[Any, Any]:
        """Megatron's forward step: the model's output, and the function that makes a loss of it."""
        item = next(work)
        output = model(item.micro_batch)
        if isinstance(output, torch.Tensor):
            return output, None  # hidden states for the next chunk
        logprobs_N, *others = output

        def compute_loss(current_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
            """Returns (loss to sum, Megatron's token count, which we do not use, metrics)."""
            if device.on_cuda():
                torch.cuda.synchronize()  # the forward pass is not the loss's time
            started = time.monotonic()
            if self.train.record_trained_tokens:
                self._current.append(current_N.detach())
            outputs = self._objective(item.inputs(current_N, *others))
            check_outputs(self.algorithm.objective, outputs)
            value = float(outputs.loss.detach())
            self._loss_seconds += time.monotonic() - started
            if not math.isfinite(value):
                self._bad_losses.append(value)
            return outputs.loss, torch.tensor(1, dtype=torch.int), dict(outputs.metrics)

        return logprobs_N, compute_loss

    def _evaluation_step(self, work: Iterator[_LossWork], model: torch.nn.Module) -> tuple[Any, Any]:
        """Megatron's forward step where the metrics of the loss are all that is wanted."""
        item = next(work)
        output = model(item.micro_batch)
        if isinstance(output, torch.Tensor):
            return output, None
        logprobs_N, *others = output

        def measure(current_N: torch.Tensor, *, non_loss_data: bool) -> dict[str, Metric]:
            outputs = self._objective(item.inputs(current_N, *others))
            return {"loss": Sum(float(outputs.loss)), **outputs.metrics}

        return logprobs_N, measure


def _loss_work(
    mini_batch: TrainBatch,
    micro_batch: MicroBatch,
    old: SampleNumbers | None,
    reference: SampleNumbers | None,
    numbers: Sequence[Mapping[str, float]],
    *,
    teacher: SampleNumbers | None,
    targets: Targets | None,
    with_staleness: bool,
    with_top: bool,
) -> _LossWork:
    """Picks the values of the micro-batch's wanted tokens out of the mini-batch's arrays."""
    samples = mini_batch.samples

    def pick(arrays: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        return torch.from_numpy(micro_batch.pick(arrays)).to(device.device())

    def of_rows(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device.device())

    trained = mini_batch.trained
    row_indices = [index for index, wanted_N in micro_batch.rows if len(wanted_N)]
    row_samples = [samples[index] for index in row_indices]
    tokens_of_row = [len(wanted_N) for _, wanted_N in micro_batch.rows if len(wanted_N)]
    rows = Rows(
        row_N=torch.arange(len(row_indices))
        .repeat_interleave(torch.tensor(tokens_of_row, dtype=torch.int64))
        .to(device.device()),
        tokens_R=of_rows(tokens_of_row),
        rollout_tokens_R=of_rows(trained.tokens_of_rollout[sample.rollout_id] for sample in row_samples),
        group_tokens_R=of_rows(trained.tokens_of_group[sample.group_id] for sample in row_samples),
    )
    columns: dict[str, torch.Tensor] = {}
    for name in _common_names([sample.columns for sample in samples]):
        columns[name] = pick([sample.columns[name] for sample in samples])
    if teacher is not None:
        columns[TEACHER_COLUMN] = pick(teacher)
    if with_staleness:
        ages = [mini_batch.version - sample.versions_T for sample in samples]
        columns[STALENESS] = pick([ages_T.astype(np.float32) for ages_T in ages])
    row_numbers: dict[str, torch.Tensor] = {}
    for name in _common_names([numbers[index] for index in row_indices]):
        row_numbers[name] = of_rows(numbers[index][name] for index in row_indices)
    after_update = [sampled_after_update(sample, mini_batch.version) for sample in mini_batch.samples]
    after_update_N = None
    if any(after_update_T.any() for after_update_T in after_update):
        after_update_N = pick([after_update_T.astype(np.float32) for after_update_T in after_update]) > 0
    loss_inputs = partial(
        LossInputs,
        rollout_N=pick([sample.rollout_logprobs_T for sample in mini_batch.samples]),
        advantages_N=pick(mini_batch.advantages),
        old_N=None if old is None else pick(old),
        reference_N=None if reference is None else pick(reference),
        values_N=None if targets is None else pick(targets.old),
        rows=rows,
        denominators=Denominators.of(trained),
        columns=columns,
        numbers=row_numbers,
        after_update_N=after_update_N,
    )
    top = _top_tokens(mini_batch, micro_batch) if with_top else None
    return _LossWork(micro_batch, loss_inputs, top)


def _top_tokens(mini_batch: TrainBatch, micro_batch: MicroBatch) -> "partial[TopTokens]":
    """The candidates of the micro-batch's wanted tokens, without their current log-probs. K is 1 where no row
    has candidates."""
    candidates_NK = micro_batch.candidates_NK
    if candidates_NK is None:
        candidates_NK = np.full((len(micro_batch.targets_N), 1), NO_TOKEN, np.int64)
    width = candidates_NK.shape[1]
    rollout = [TopLogprobs.none(0, width)]
    for index, wanted_N in micro_batch.rows:
        top = mini_batch.samples[index].top_logprobs
        if top is None:
            rollout.append(TopLogprobs.none(len(wanted_N), width))
        else:
            rollout.append(top.at(wanted_N))
    rollout_NK = TopLogprobs.joined(rollout).logprobs_TK[:, :width]
    target = device.device()
    ids_NK = torch.from_numpy(candidates_NK).to(target)
    return partial(
        TopTokens,
        rollout_NK=torch.from_numpy(rollout_NK).to(target),
        ids_NK=ids_NK,
        is_sampled_NK=ids_NK == torch.from_numpy(micro_batch.targets_N).to(target)[:, None],
    )


def _common_names(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """The names that are in all of them."""
    if not mappings:
        return []
    first, *others = mappings
    return [name for name in first if all(name in other for other in others)]


def _row_table(
    mini_batch: TrainBatch,
    indices: Sequence[int],
    current: SampleNumbers,
    reference: SampleNumbers | None,
) -> RowTable:
    """Of the samples with these indices, all of which have a trained token."""
    samples = [mini_batch.samples[index] for index in indices]

    def sums(arrays: SampleNumbers) -> NDArray[np.float64]:
        """Over the trained tokens; the arrays are 0 elsewhere."""
        return np.array([arrays[index].sum(dtype=np.float64) for index in indices], np.float64)

    return RowTable(
        group_ids=tuple(sample.group_id for sample in samples),
        tokens_M=np.array([sample.loss_mask_T.sum() for sample in samples], np.float64),
        current_M=sums(current),
        reference_M=None if reference is None else sums(reference),
        numbers={
            name: np.array([sample.numbers[name] for sample in samples], np.float64)
            for name in _common_names([sample.numbers for sample in samples])
        },
    )


def _work_amounts(shard: Shard, packed: Sequence[Packed], seconds: float) -> dict[str, Metric]:
    """How much this rank computed. Merging the ranks' metrics adds these up."""
    trained_tokens = 0
    row_tokens = 0
    for mini_batch in shard:
        for sample in mini_batch.samples:
            trained_tokens += int(sample.loss_mask_T.sum())
            row_tokens += len(sample.tokens_T)
    micro_batches = micro_batches_of(packed)
    return {
        "tokens": Sum(trained_tokens),
        "computed_tokens": Sum(sum(len(micro_batch.tokens_P) for micro_batch in micro_batches)),
        "row_tokens": Sum(row_tokens),
        "projected_tokens": Sum(sum(len(micro_batch.project_U) for micro_batch in micro_batches)),
        "micro_batches": Sum(len(micro_batches)),
        "largest_micro_batch": Max(
            max((len(micro_batch.tokens_P) for micro_batch in micro_batches), default=0)
        ),
        "tokens_per_s": Sum(row_tokens / seconds if seconds else 0.0),
    }
