"""One training step: values, old and reference log-probs, then one optimizer step per
mini-batch.

With a critic, its values of the whole batch come first, and the advantages are computed
from them. Each mini-batch is then an optimizer step of the critic, and one of the
policy unless only the critic learns yet.

Micro-batches go through the chunks of the model in Megatron's schedule, whatever the
layout. Every rank of a replica packs the same micro-batches; only the last pipeline
stage has log-probs, losses and their metrics.

There are three policies: *rollout* (the engine's log-probs, in the batch), *old* (this
model before the batch's first optimizer step), and *current*. In the first optimizer
step of a batch old and current are the same numbers, so no forward pass is spent on old
there. Old and reference log-probs are computed if the objective needs them, in the
micro-batches that are then trained, each in one pass over all mini-batches. An
objective that compares sequences costs one more forward pass per mini-batch
(`sample_table.py`). Imported after `device.prepare()`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives.objectives import load_objective, objective_needs
from invrl.algorithms.policy_loss.axis_plugins import load_sample_weight
from invrl.errors import TrainError
from invrl.interfaces import Objective, StepResult, TokenRecord
from invrl.train.batches.grammar_masks import GrammarMasks
from invrl.train.batches.sharding import Shard
from invrl.train.config import TrainConfig
from invrl.train.cost.model_size import ComputeCost
from invrl.train.critic.critic import Critic, Targets
from invrl.train.layers.expert_load import ExpertRouters
from invrl.train.layers.routing_replay import RoutingRecorder
from invrl.train.model.nonfinite_steps import NonfiniteSteps
from invrl.train.model.optimizer import apply_gradients, forget_moments
from invrl.train.model.pipeline_schedule import (
    Packed,
    SampleNumbers,
    concatenate_micro_batches,
)
from invrl.train.model.reference import BaseReference, FrozenReference
from invrl.train.model.step_progress import StepProgress
from invrl.train.parallel.process_group import any_rank
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.runtime import device
from invrl.train.step.adapted_settings import AdaptedSettings
from invrl.train.step.advantage_estimation import estimate_advantages
from invrl.train.step.forward_backward import LossPass
from invrl.train.step.logprob_passes import LogprobPasses
from invrl.train.step.loss_tensors import LossBatch, make_loss_batches
from invrl.train.step.prepared_batch import BatchWithAdvantages, Prepared
from invrl.train.step.rollout_kl import with_rollout_kl
from invrl.train.step.sample_columns import coupled_numbers, with_rollout_numbers
from invrl.train.step.throughput import work_amounts
from invrl.train.step.token_records import mini_batch_records
from invrl.types.batches import TrainBatch
from invrl.types.metrics import Max, Mean, Metric, merge, timed

_WITHOUT_CANDIDATES = (
    "the objective reads the likeliest tokens in the place of each trained one, and no sample of the batch has "
    "them: sample it with --rollout-top-logprobs, or train with another --policy-loss"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PolicyStep:
    """Result of an optimizer step of the policy."""

    grad_norm: float
    """0 or not finite: no step was made."""
    bad_losses: list[float]
    """Losses on this rank that are not finite."""
    metrics: list[dict[str, Metric]]
    """Of each micro-batch, and of the step; empty if the gradient is not finite."""
    records: list[TokenRecord]


@dataclass(slots=True, eq=False)
class TrainStep:
    """Trains a batch with the model, the optimizer and the frozen models of one
    rank."""

    chunks: Sequence[DistributedDataParallel]
    """This rank's part of the model: one chunk, or several with virtual pipeline
    stages."""
    optimizer: ChainedOptimizer
    schedule: OptimizerParamScheduler
    reference: FrozenReference | BaseReference | None
    teacher: FrozenReference | None
    """None: the objective needs none, or the samples already have the teacher's
    log-probs."""
    _: KW_ONLY
    layout: ParallelLayout
    train: TrainConfig
    algorithm: AlgorithmConfig
    cost: ComputeCost
    masks: GrammarMasks
    critic: Critic | None = None
    """None: the objective needs no values."""
    routing: RoutingRecorder | None
    """None: no routing is replayed or compared."""
    expert_routers: ExpertRouters | None
    """None: no layer has experts."""
    adapted: AdaptedSettings = field(init=False)
    logprob_passes: LogprobPasses = field(init=False)
    _objective: Objective = field(init=False)
    _nonfinite: NonfiniteSteps = field(init=False)

    def __post_init__(self) -> None:
        self.adapted = AdaptedSettings(self.algorithm, self.layout)
        self.logprob_passes = LogprobPasses(
            self.chunks,
            layout=self.layout,
            train=self.train,
            algorithm=self.algorithm,
            cost=self.cost,
            routing=self.routing,
        )
        self._objective = load_objective(self.algorithm)
        self._nonfinite = NonfiniteSteps(self.train.max_nonfinite_steps)

    def run(self, shard: Shard) -> StepResult:
        """Make one optimizer step per mini-batch.

        Raises TrainError if the objective reads the likeliest tokens and no sample has
        them.

        A mini-batch whose gradient is exactly 0 (no advantage, no KL term) makes no
        step: neither the weights nor Adam's moments nor the schedule change. Nor does
        one whose loss, on any rank, or whose gradient is not finite; its numbers are
        left out of the metrics. Raises TrainError at the last of `max_nonfinite_steps`
        of these in a row.
        """
        prepared = self.prepare(shard)
        values = None
        if self.critic is not None and prepared.packed:
            self.progress.begin("values of the critic")
            with device.timed(prepared.seconds, "values"):
                values = self.critic.values(prepared.packed)
        with_advantages = self.compute_advantages(prepared, values)
        learns_alone = self.critic is not None and self.critic.learns_alone
        return self.learn(prepared, with_advantages, critic_learns_alone=learns_alone)

    def prepare(self, shard: Shard) -> Prepared:
        """Compute the log-probs that the objective needs of a batch, before its first
        optimizer step."""
        started = time.monotonic()
        seconds: dict[str, float] = {}
        self._objective = load_objective(self.adapted.settings())
        self._check_candidates(shard)
        with timed(seconds, "objective"):
            packed = [
                self.logprob_passes.pack(self.masks.sequences(mini_batch.samples))
                for mini_batch in shard
            ]
        reference = self.logprob_passes.frozen_logprobs(
            self.reference, "reference", packed, seconds
        )
        teacher = self.logprob_passes.frozen_logprobs(
            self.teacher, "teacher", packed, seconds
        )
        old_by_step = self.logprob_passes.old_logprobs(shard, packed, seconds)
        before: list[SampleNumbers] = []
        algorithm = self.algorithm
        if (
            objective_needs(algorithm).values
            or algorithm.token_level
            or algorithm.kl_in_rollout_rewards
        ):
            for mini_batch, part, old in zip(shard, packed, old_by_step, strict=True):
                if old is None:
                    old = self.logprob_passes.logprobs_before_step(
                        mini_batch, part, seconds
                    )
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

    def learn(
        self,
        prepared: Prepared,
        with_advantages: BatchWithAdvantages,
        *,
        critic_learns_alone: bool,
    ) -> StepResult:
        """Make the optimizer steps of `run`: of a critic on these ranks, and of the
        policy, which makes none while only the critic learns."""
        seconds = prepared.seconds
        packed = prepared.packed
        metrics: dict[str, Metric] = dict(with_advantages.metrics)
        optimizer_steps = 0
        critic_steps = 0
        skipped_steps = 0
        nonfinite_steps = 0
        token_records: list[TokenRecord | None] = []
        for mini_batch, packed_sequences, old, reference, teacher, targets in zip(
            with_advantages.shard,
            packed,
            prepared.old,
            prepared.reference,
            prepared.teacher,
            with_advantages.targets,
            strict=True,
        ):
            self.progress.next_mini_batch(len(packed))
            if self.critic is not None:
                assert targets is not None, "the critic has judged the batch"
                self.progress.begin("gradients of the critic")
                with device.timed(seconds, "critic"):
                    critic_step = self.critic.step(packed_sequences, targets)
                if not math.isfinite(critic_step.grad_norm):
                    nonfinite_steps += 1
                    token_records += [None] * len(mini_batch.samples)
                    self._nonfinite.count(
                        mini_batch, critic_step.grad_norm, critic_step.bad_losses
                    )
                    continue
                critic_steps += critic_step.grad_norm > 0.0
                metrics = merge([metrics, critic_step.metrics])
            if critic_learns_alone:
                token_records += [None] * len(mini_batch.samples)
                self._nonfinite.end()
                continue
            step = self._policy_step(
                mini_batch,
                packed_sequences,
                old=old,
                reference=reference,
                teacher=teacher,
                targets=targets,
                seconds=seconds,
            )
            token_records += step.records
            if not math.isfinite(step.grad_norm):
                nonfinite_steps += 1
                self._nonfinite.count(mini_batch, step.grad_norm, step.bad_losses)
                continue
            self._nonfinite.end()
            if step.grad_norm > 0.0:
                optimizer_steps += 1
            else:
                skipped_steps += 1
            metrics = merge([metrics, *step.metrics])
        self.progress.end()
        metrics |= self.adapted.adapt("batch", [metrics], changes=True)
        self._move_reference(prepared.shard)
        if self.critic is not None:
            self.critic.batches += 1
            metrics["critic_steps"] = Max(critic_steps)
        metrics |= self._routing_metrics(packed)
        metrics |= work_amounts(
            prepared.shard, packed, time.monotonic() - prepared.started
        )
        # Max, because these are the same on every rank.
        metrics["optimizer_steps"] = Max(optimizer_steps)
        metrics["skipped_steps"] = Max(skipped_steps)
        metrics["nonfinite_steps"] = Max(nonfinite_steps)
        return StepResult(
            optimizer_steps=optimizer_steps,
            nonfinite_steps=nonfinite_steps,
            metrics=metrics,
            seconds=seconds,
            token_records=tuple(token_records)
            if self.train.record_trained_tokens
            else (),
        )

    def _policy_step(
        self,
        mini_batch: TrainBatch,
        packed: Packed,
        *,
        old: SampleNumbers | None,
        reference: SampleNumbers | None,
        teacher: SampleNumbers | None,
        targets: Targets | None,
        seconds: dict[str, float],
    ) -> _PolicyStep:
        """Make the policy's step on a mini-batch, and what follows from it: the next
        learning rate, adapted settings, balanced experts."""
        numbers = self._sequence_numbers(mini_batch, packed, reference, seconds)
        with timed(seconds, "objective"):
            work = make_loss_batches(
                mini_batch,
                packed,
                old,
                reference,
                numbers,
                algorithm=self.algorithm,
                teacher=teacher,
                targets=targets,
            )
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        loss_pass = self._loss_pass(records_logprobs=self.train.record_trained_tokens)
        grad_norm, loss_metrics = self._update(loss_pass, work, seconds)
        metrics: list[dict[str, Metric]] = []
        if math.isfinite(grad_norm):
            if grad_norm > 0.0:
                self.schedule.step(1)
            step_metrics: dict[str, Metric] = {
                "grad_norm": Mean(grad_norm),
                "lr": Mean(learning_rate),
            }
            if loss_pass.losses:
                # The sum over replicas, the mean over optimizer steps.
                step_metrics["minimized_loss"] = Mean(
                    sum(loss_pass.losses), 1 / self.layout.data
                )
            step_metrics |= self.adapted.adapt(
                "optimizer_step", loss_metrics, changes=grad_norm > 0.0
            )
            expert_metrics = self._expert_metrics(balance=grad_norm > 0.0)
            metrics = [*loss_metrics, step_metrics, expert_metrics]
        return _PolicyStep(
            grad_norm=grad_norm,
            bad_losses=loss_pass.bad_losses,
            metrics=metrics,
            records=mini_batch_records(mini_batch, packed, old, loss_pass.current),
        )

    @property
    def progress(self) -> StepProgress:
        """Current work. Other threads may read it."""
        return self.logprob_passes.progress

    def _loss_pass(self, *, records_logprobs: bool) -> LossPass:
        return LossPass(
            self.chunks,
            self.algorithm.objective,
            self._objective,
            records_logprobs=records_logprobs,
            progress=self.progress,
        )

    def _update(
        self, loss_pass: LossPass, work: Sequence[LossBatch], seconds: dict[str, float]
    ) -> tuple[float, list[dict[str, Metric]]]:
        """Make the optimizer's step on a mini-batch. Returns the norm of its gradient,
        and the metrics of each micro-batch. With a norm of 0, or one that is not
        finite, no weight has changed."""
        self.progress.begin("gradients")
        with device.timed(seconds, "forward_backward"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            if self.expert_routers is not None:
                self.expert_routers.clear()
            loss_metrics = loss_pass.gradients(work)
        loss_seconds = loss_pass.stopwatch.seconds()
        seconds["forward_backward"] -= loss_seconds
        seconds["objective"] += loss_seconds
        grad_norm = math.nan
        self.progress.begin("optimizer step")
        with device.timed(seconds, "optimizer"):
            if not any_rank(bool(loss_pass.bad_losses)):
                grad_norm = apply_gradients(self.optimizer)
        return grad_norm, loss_metrics

    def evaluate(self, shard: Shard) -> dict[str, Metric]:
        """Return the objective's metrics of samples that are not trained: no weight and
        no state changes. `loss` is the objective's own metric of that name, else its
        loss. Nothing on a pipeline stage that is not the last."""
        seconds: dict[str, float] = {}
        packed = [
            self.logprob_passes.pack(self.masks.sequences(mini_batch.samples))
            for mini_batch in shard
        ]
        reference_by_part = self.logprob_passes.frozen_logprobs(
            self.reference, "reference", packed, seconds
        )
        measured: list[dict[str, Metric]] = []
        for mini_batch, packed_sequences, reference in zip(
            shard, packed, reference_by_part, strict=True
        ):
            numbers = self._sequence_numbers(
                mini_batch, packed_sequences, reference, seconds
            )
            work = make_loss_batches(
                mini_batch,
                packed_sequences,
                None,
                reference,
                numbers,
                algorithm=self.algorithm,
            )
            self.progress.begin("held-out samples")
            measured += self._loss_pass(records_logprobs=False).metrics(work)
        self.progress.end()
        return merge(measured)

    def _move_reference(self, shard: Shard) -> None:
        """Let the reference follow the policy, if the settings say so. A version is a
        batch, and the batch's own is that of the weights before it."""
        if not isinstance(self.reference, FrozenReference) or not shard:
            return
        interval = self.algorithm.reference.reset_steps
        if interval and (shard[0].version + 1) % interval == 0:
            self.reference.follow(1.0)
            if self.algorithm.reference.reset_optimizer:
                forget_moments(self.optimizer)
        if self.algorithm.reference.ema:
            self.reference.follow(1.0 - self.algorithm.reference.ema)

    def _expert_metrics(self, *, balance: bool) -> dict[str, Metric]:
        """Return the spread of the mini-batch's tokens over the experts. With
        `balance`, the routers' biases then make their step."""
        if self.expert_routers is None:
            return {}
        load = self.expert_routers.load()
        if balance:
            self.expert_routers.balance(load)
        return load.metrics()

    def _check_candidates(self, shard: Shard) -> None:
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        if not samples or not objective_needs(self.algorithm).top_logprobs:
            return
        if all(sample.top_logprobs is None for sample in samples):
            raise TrainError(_WITHOUT_CANDIDATES)

    def compute_advantages(
        self, prepared: Prepared, values: Sequence[SampleNumbers] | None
    ) -> BatchWithAdvantages:
        """Compute advantages and the critic's targets, before the batch's first
        optimizer step. `values` are the critic's, by mini-batch; None without a critic.
        The batch stays unchanged if its advantages were computed when it was taken."""
        shard = prepared.shard
        algorithm = self.algorithm
        is_computed = (
            values is not None
            or algorithm.token_level
            or algorithm.kl_in_rollout_rewards
        )
        if not is_computed or not prepared.packed:
            return BatchWithAdvantages(
                shard=shard, targets=[None] * len(shard), metrics={}
            )
        with timed(prepared.seconds, "objective"):
            if algorithm.kl_in_rollout_rewards:
                return with_rollout_kl(
                    shard,
                    old=prepared.before,
                    reference=prepared.reference,
                    config=self.adapted.settings(),
                )
            return estimate_advantages(
                shard,
                values,
                old=prepared.before,
                reference=prepared.reference,
                config=self.adapted.settings(),
            )

    def _sequence_numbers(
        self,
        mini_batch: TrainBatch,
        packed: Packed,
        reference: SampleNumbers | None,
        seconds: dict[str, float],
    ) -> list[Mapping[str, float]]:
        """Return the numbers of each sample: its own, those that the objective computes
        from other samples, and those of its rollout that weigh its loss."""
        algorithm = self.algorithm
        numbers = [sample.numbers for sample in mini_batch.samples]
        if objective_needs(algorithm).sample_table:
            with device.timed(seconds, "row_table"):
                [current] = self.logprob_passes.forward([packed], "rows to compare")
                numbers = coupled_numbers(
                    algorithm.objective, self._objective, mini_batch, current, reference
                )
        sample_weight = load_sample_weight(self.adapted.settings())
        if sample_weight is None:
            return numbers
        of_rollout = sample_weight.numbers(mini_batch.trained)
        return with_rollout_numbers(mini_batch, numbers, of_rollout)

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
            for micro_batch in concatenate_micro_batches(packed):
                if micro_batch.sequences:
                    num_tokens += len(micro_batch.tokens_P)
                    num_unknown += micro_batch.num_unrecorded
            metrics["routing_unknown"] = Mean(num_unknown, num_tokens)
        return metrics
