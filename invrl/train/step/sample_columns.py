"""Numbers of the samples of a mini-batch: their own, those that an objective computes
from other samples, and those of its rollout.

Imported after `device.prepare()`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.objectives.objectives import load_coupling
from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.errors import TrainError
from invrl.interfaces import Objective
from invrl.train.model.pipeline_schedule import SampleNumbers
from invrl.train.parallel.process_group import gather_samples
from invrl.types.batches import TrainBatch


def coupled_numbers(
    name: str,
    objective: Objective,
    mini_batch: TrainBatch,
    current: SampleNumbers,
    reference: SampleNumbers | None,
) -> list[Mapping[str, float]]:
    """Return the numbers of each sample, including its own. `name` is that of the
    objective, which compares the samples of all ranks. `current` and `reference` are
    log-probs of the trained tokens. Raises TrainError if the objective returns a name
    that a sample has already."""
    numbers: list[Mapping[str, float]] = [
        sample.numbers for sample in mini_batch.samples
    ]
    indices = [
        index
        for index, sample in enumerate(mini_batch.samples)
        if sample.loss_mask_T.any()
    ]
    table, first = gather_samples(
        _sample_table(mini_batch, indices, current, reference)
    )
    coupled = load_coupling(name, objective)(table)
    for place, index in enumerate(indices, start=first):
        _check_names(name, coupled, numbers[index])
        of_sample = {key: float(values_M[place]) for key, values_M in coupled.items()}
        numbers[index] = {**numbers[index], **of_sample}
    return numbers


def with_rollout_numbers(
    mini_batch: TrainBatch,
    numbers: Sequence[Mapping[str, float]],
    of_rollout: Mapping[str, Mapping[str, float]],
) -> list[Mapping[str, float]]:
    """Return the numbers of each sample, with those of its rollout if it has any."""
    return [
        {**of_sample, **of_rollout.get(sample.rollout_id, {})}
        for sample, of_sample in zip(mini_batch.samples, numbers, strict=True)
    ]


def _check_names(
    name: str, coupled: Mapping[str, object], given: Mapping[str, float]
) -> None:
    taken = sorted(coupled.keys() & given.keys())
    if taken:
        raise TrainError(
            f"the objective {name} gives samples the number {taken[0]!r}, which they "
            "have already: name it otherwise in `couple`, or in --session.extra-columns"
        )


def _sample_table(
    mini_batch: TrainBatch,
    indices: Sequence[int],
    current: SampleNumbers,
    reference: SampleNumbers | None,
) -> SampleTable:
    """Build the table of the samples with these indices, all of which have a trained
    token."""
    samples = [mini_batch.samples[index] for index in indices]

    def sums(arrays: SampleNumbers) -> NDArray[np.float64]:
        """Sum over the trained tokens; the arrays are 0 elsewhere."""
        return np.array(
            [arrays[index].sum(dtype=np.float64) for index in indices], np.float64
        )

    return SampleTable(
        group_ids=tuple(sample.group_id for sample in samples),
        tokens_M=np.array([sample.loss_mask_T.sum() for sample in samples], np.float64),
        current_M=sums(current),
        reference_M=None if reference is None else sums(reference),
        numbers={
            name: np.array([sample.numbers[name] for sample in samples], np.float64)
            for name in common_names([sample.numbers for sample in samples])
        },
    )


def common_names(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names that are in all of them."""
    if not mappings:
        return []
    first, *others = mappings
    return [name for name in first if all(name in other for other in others)]
