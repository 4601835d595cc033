"""Inputs of the loss of each micro-batch, in addition to the current policy's numbers.

The values of a micro-batch's wanted tokens are picked out of the arrays of the
mini-batch's samples. Imported after `device.prepare()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, Samples, TopTokens
from invrl.algorithms.objectives.objectives import (
    STALENESS_COLUMN,
    TEACHER_COLUMN,
    Needs,
    objective_needs,
)
from invrl.train.batches.micro_batch import MicroBatch
from invrl.train.critic.critic import Targets
from invrl.train.model.pipeline_schedule import Packed, SampleNumbers
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.train.step.mid_turn_updates import sampled_after_update
from invrl.train.step.sample_columns import common_names
from invrl.types.batches import TrainBatch
from invrl.types.top_logprobs import NO_TOKEN, TopLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """A micro-batch, and the inputs of its loss in addition to the current policy's
    numbers."""

    micro_batch: MicroBatch
    loss_inputs: "partial[LossInputs]"
    """Lacks `current_N`, `entropy_N`, `top` and `router_shift_N`."""
    top: "partial[TopTokens] | None"
    """Lacks `current_NK`. None: the objective does not need them."""

    def inputs(
        self,
        current_N: torch.Tensor,
        entropy_N: torch.Tensor,
        current_NK: torch.Tensor | None,
        router_shift_N: torch.Tensor | None,
    ) -> LossInputs:
        """Add the model's outputs; `current_NK` None: the micro-batch has no
        candidates."""
        top = None
        if self.top is not None:
            if current_NK is None:
                # minus infinity, as under any policy
                current_NK = self.top.keywords["rollout_NK"]
            top = self.top(current_NK=current_NK)
        return self.loss_inputs(
            current_N=current_N,
            entropy_N=entropy_N,
            top=top,
            router_shift_N=router_shift_N,
        )


def make_loss_batches(
    mini_batch: TrainBatch,
    packed: Packed,
    old: SampleNumbers | None,
    reference: SampleNumbers | None,
    numbers: Sequence[Mapping[str, float]],
    *,
    algorithm: AlgorithmConfig,
    teacher: SampleNumbers | None = None,
    targets: Targets | None = None,
) -> list[LossBatch]:
    """Return the loss work of each micro-batch."""
    needs = objective_needs(algorithm)
    return [
        _of_micro_batch(
            mini_batch,
            micro_batch,
            old,
            reference,
            numbers,
            teacher=teacher,
            targets=targets,
            needs=needs,
        )
        for micro_batch in packed.micro_batches
    ]


def _of_micro_batch(
    mini_batch: TrainBatch,
    micro_batch: MicroBatch,
    old: SampleNumbers | None,
    reference: SampleNumbers | None,
    numbers: Sequence[Mapping[str, float]],
    *,
    teacher: SampleNumbers | None,
    targets: Targets | None,
    needs: Needs,
) -> LossBatch:
    """Pick the values of the micro-batch's wanted tokens out of the mini-batch's
    arrays."""
    samples = mini_batch.samples

    def pick(arrays: Sequence[NDArray[np.float32]]) -> torch.Tensor:
        return to_device(micro_batch.pick(arrays), device.device())

    def sample_tensor(values: Iterable[float]) -> torch.Tensor:
        return to_device(np.array(list(values), np.float32), device.device())

    trained = mini_batch.trained
    trained_indices = [
        index for index, wanted_N in micro_batch.sequences if len(wanted_N)
    ]
    trained_samples = [samples[index] for index in trained_indices]
    tokens_of_sample = [
        len(wanted_N) for _, wanted_N in micro_batch.sequences if len(wanted_N)
    ]
    loss_samples = Samples(
        sample_N=to_device(
            np.arange(len(trained_indices)).repeat(tokens_of_sample), device.device()
        ),
        tokens_R=sample_tensor(tokens_of_sample),
        rollout_tokens_R=sample_tensor(
            trained.tokens_of_rollout[sample.rollout_id] for sample in trained_samples
        ),
        group_tokens_R=sample_tensor(
            trained.tokens_of_group[sample.group_id] for sample in trained_samples
        ),
    )
    columns: dict[str, torch.Tensor] = {}
    for name in common_names([sample.columns for sample in samples]):
        columns[name] = pick([sample.columns[name] for sample in samples])
    if teacher is not None:
        columns[TEACHER_COLUMN] = pick(teacher)
    if needs.staleness:
        ages = [mini_batch.version - sample.versions_T for sample in samples]
        columns[STALENESS_COLUMN] = pick([ages_T.astype(np.float32) for ages_T in ages])
    sample_numbers: dict[str, torch.Tensor] = {}
    for name in common_names([numbers[index] for index in trained_indices]):
        sample_numbers[name] = sample_tensor(
            numbers[index][name] for index in trained_indices
        )
    after_update = [
        sampled_after_update(sample, mini_batch.version)
        for sample in mini_batch.samples
    ]
    after_update_N = None
    if any(after_update_T.any() for after_update_T in after_update):
        after_update_N = (
            pick([after_update_T.astype(np.float32) for after_update_T in after_update])
            > 0
        )
    loss_inputs = partial(
        LossInputs,
        rollout_N=pick([sample.rollout_logprobs_T for sample in mini_batch.samples]),
        advantages_N=pick(mini_batch.advantages),
        old_N=None if old is None else pick(old),
        reference_N=None if reference is None else pick(reference),
        values_N=None if targets is None else pick(targets.old),
        samples=loss_samples,
        denominators=Denominators.of(trained),
        columns=columns,
        numbers=sample_numbers,
        after_update_N=after_update_N,
    )
    top = _top_tokens(mini_batch, micro_batch) if needs.top_logprobs else None
    return LossBatch(micro_batch, loss_inputs, top)


def _top_tokens(
    mini_batch: TrainBatch, micro_batch: MicroBatch
) -> "partial[TopTokens]":
    """Return the candidates of the micro-batch's wanted tokens, without their current
    log-probs. K is 1 if no sample has candidates."""
    candidates_NK = micro_batch.candidates_NK
    if candidates_NK is None:
        candidates_NK = np.full((len(micro_batch.targets_N), 1), NO_TOKEN, np.int64)
    width = candidates_NK.shape[1]
    rollout = [TopLogprobs.none(0, width)]
    for index, wanted_N in micro_batch.sequences:
        top = mini_batch.samples[index].top_logprobs
        if top is None:
            rollout.append(TopLogprobs.none(len(wanted_N), width))
        else:
            rollout.append(top.at(wanted_N))
    rollout_NK = TopLogprobs.joined(rollout).logprobs_TK[:, :width]
    target = device.device()
    ids_NK = to_device(candidates_NK, target)
    return partial(
        TopTokens,
        rollout_NK=to_device(rollout_NK, target),
        ids_NK=ids_NK,
        is_sampled_NK=ids_NK == to_device(micro_batch.targets_N, target)[:, None],
    )
