"""The canary of a weight update: how far an engine's log-probs of fixed prompts may be
from the trainer's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.errors import CanaryError
from invrl.types.weights import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBound:
    """Largest |engine - trainer| log-prob gap in nats on the canary prompts."""

    max_gap: float
    mean_gap: float

    @classmethod
    def for_dtypes(cls, *dtypes: str) -> CanaryBound:
        """Choose the bound by the coarsest dtype of engine and trainer.

        fp32 against fp32 differs by 1e-5. bf16 differs by a few hundredths on average
        and far more on single unlikely tokens, so for bf16 the mean is the bound that
        matters.
        """
        if all(dtype == "float32" for dtype in dtypes):
            return cls(max_gap=1e-3, mean_gap=1e-3)
        return cls(max_gap=2.0, mean_gap=0.1)

    def check(
        self, name: str, difference: NDArray[np.float32], version: WeightVersion
    ) -> tuple[float, float]:
        """`difference`: engine less trainer, of all tokens of the prompts, in nats.
        Returns (largest, mean) gap of the engine called `name`. Raises CanaryError
        beyond the bound."""
        gaps = np.abs(difference)
        max_gap = float(gaps.max())
        mean_gap = float(gaps.mean())
        # A comparison with NaN is False, so a NaN does not pass.
        is_within = max_gap <= self.max_gap and mean_gap <= self.mean_gap
        if not is_within:
            raise CanaryError(
                f"{name} serves another model than the trained one: on the canary prompts of version "
                f"{version} log-probs differ by {max_gap:.2e} at most and {mean_gap:.2e} on average; "
                f"the bounds are {self.max_gap:.0e} and {self.mean_gap:.0e}",
                engine=name,
            )
        return max_gap, mean_gap
