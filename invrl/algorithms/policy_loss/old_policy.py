"""The old (proximal) policy, around which the clip bounds the current one."""

from torch import Tensor

from invrl.algorithms.loss_inputs import LossInputs

STALENESS = "staleness"
"""Column that `interpolated` reads: number of weight versions since the token was
sampled."""


def old_logprobs(inputs: LossInputs, source: str) -> Tensor:
    """Return log-probs [N] under the old policy, detached. `source` is the setting
    `old_logprobs`.

    recompute: those before the batch's first optimizer step, where they differ from the
    current ones. engine: the engine's, so that the clip is around the sampling policy.
    interpolated: `interpolated` between the two, without a model pass.

    Raises ValueError for interpolated ones without the column `staleness`.
    """
    if source == "engine":
        return inputs.rollout_N.detach()
    if source == "interpolated":
        staleness_N = inputs.columns.get(STALENESS)
        if staleness_N is None:
            raise ValueError("interpolated old log-probs need the column `staleness`")
        return interpolated(inputs.current_N, inputs.rollout_N, staleness_N)
    if inputs.old_N is not None:
        return inputs.old_N.detach()
    return inputs.current_N.detach()


def interpolated(current_N: Tensor, rollout_N: Tensor, staleness_N: Tensor) -> Tensor:
    """A-3PO's proximal policy (arXiv 2512.06547), from log-probs: [N], [N], [N] -> [N],
    detached.

        log old = a log rollout + (1 - a) sg[log current],    a = 1 / d, or 0 where d = 0

    d is the token's staleness: the trained version minus the version that sampled it.
    So old is the engine's policy at d = 1 and approaches the current one with age. A
    version is a batch, so all mini-batches of a batch have the same d. AReaL's
    `loglinear` is equal for d >= 1; at d = 0 it takes the engine's policy, where the
    paper takes the current one, and so do we.
    """
    share_N = 1.0 / staleness_N.clamp(min=1.0) * (staleness_N > 0)
    return share_N * rollout_N.detach() + (1.0 - share_N) * current_N.detach()
