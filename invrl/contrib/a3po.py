"""A-3PO: an old policy that is interpolated, without a model pass (arXiv 2512.06547).

`--old-logprobs invrl.contrib.a3po:Interpolated`, or the preset `a3po`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from invrl.algorithms.objectives.objectives import STALENESS_COLUMN, Needs
from invrl.types.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.loss_inputs import LossInputs


class Interpolated(Section):
    """A-3PO's proximal policy.

        log old = a log rollout + (1 - a) sg[log current],    a = 1 / d, or 0 where d = 0

    d is the token's staleness: the trained version minus the version that sampled it.
    So old is the engine's policy at d = 1 and approaches the current one with age. A
    version is a batch, so all mini-batches of a batch have the same d. AReaL's
    `loglinear` is equal for d >= 1; at d = 0 it takes the engine's policy, where the
    paper takes the current one, and so do we.
    """

    needs: ClassVar = Needs(staleness=True)

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return the log-probs [N] under the old policy."""
        staleness_N = inputs.columns[STALENESS_COLUMN]
        share_N = 1.0 / staleness_N.clamp(min=1.0) * (staleness_N > 0)
        current_N = inputs.current_N.detach()
        return share_N * inputs.rollout_N.detach() + (1.0 - share_N) * current_N
