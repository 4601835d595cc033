"""A table of all samples of a mini-batch with one number each, for objectives that
compare samples.

A pair's loss depends on two samples, which may be in different micro-batches or on
different ranks. So such an objective takes two passes: the step computes every sample's
log-prob sum without a gradient; the objective's `couple` turns the table of all samples
into numbers per sample (such as the slope of the loss with respect to that sample's
sum); in the pass with a gradient each sample needs only its own numbers. At the current
weights the gradient is the same. Pure NumPy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleTable:
    """Axis M: the samples of a mini-batch that have a trained token, over all ranks.
    float64 [M] each, except for the ids."""

    group_ids: tuple[str, ...]
    tokens_M: NDArray[np.float64]
    current_M: NDArray[np.float64]
    """Sum of the trained tokens' log-probs under the current policy, in nats."""
    reference_M: NDArray[np.float64] | None
    """The same under the frozen reference; None: the objective does not need it."""
    numbers: Mapping[str, NDArray[np.float64]]
    """Numbers of `TrainSample.numbers` that all samples have."""

    @staticmethod
    def joined(tables: Sequence["SampleTable"]) -> "SampleTable":
        """Concatenate tables, as from several ranks; those without samples may lack the
        reference and numbers. Raises ValueError without a table."""
        first = max(tables, key=lambda table: len(table.group_ids))
        filled = [table for table in tables if table.group_ids] or [first]
        reference_M = None
        if first.reference_M is not None:
            reference_M = np.concatenate(
                [table.reference_M for table in filled if table.reference_M is not None]
            )
        return SampleTable(
            group_ids=tuple(
                group_id for table in filled for group_id in table.group_ids
            ),
            tokens_M=np.concatenate([table.tokens_M for table in filled]),
            current_M=np.concatenate([table.current_M for table in filled]),
            reference_M=reference_M,
            numbers={
                name: np.concatenate([table.numbers[name] for table in filled])
                for name in first.numbers
            },
        )
