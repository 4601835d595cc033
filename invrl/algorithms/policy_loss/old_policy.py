"""The old (proximal) policy, around which the clip bounds the current one."""

from torch import Tensor

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs
from invrl.algorithms.policy_loss.axis_plugins import load_old_policy


def old_logprobs(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """Return log-probs [N] under the old policy, detached.

    recompute: those before the batch's first optimizer step, where they differ from the
    current ones. engine: the engine's, so that the clip is around the sampling policy.
    Otherwise those of the user's function. Raises PluginError.
    """
    if config.old_logprobs == "engine":
        return inputs.rollout_N.detach()
    if config.old_logprobs != "recompute":
        return load_old_policy(config)(inputs).detach()
    if inputs.old_N is not None:
        return inputs.old_N.detach()
    return inputs.current_N.detach()
