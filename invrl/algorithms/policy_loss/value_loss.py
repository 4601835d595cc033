"""The critic's loss: the distance of its values from the returns."""

from torch import Tensor

from invrl.algorithms.loss_inputs import LossOutputs, token_metrics


def value_losses(
    values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float
) -> Tensor:
    """The loss of each token's value: [N], [N], [N] -> [N].

        L = max((V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2) / 2

    OpenAI's PPO (baselines `ppo2`; Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9), as in TRL and verl. The PPO paper does not have the clip.
    `old_N`: values before the batch's first optimizer step. `clip` 0: no bound, L = (V
    - R)^2 / 2.
    """
    losses_N = (values_N - returns_N).square()
    if clip:
        losses_N = losses_N.maximum(
            (_clipped(values_N, old_N, clip) - returns_N).square()
        )
    return losses_N / 2


def value_loss(
    values_N: Tensor, old_N: Tensor, returns_N: Tensor, *, clip: float, tokens: float
) -> LossOutputs:
    """Sum the token losses of one micro-batch, divided by the trained tokens of its
    mini-batch, so that micro-batches and ranks add up. float32 [N] each; `values_N` has
    the gradient."""
    losses_N = value_losses(values_N, old_N, returns_N, clip)
    values = values_N.detach()
    clipped_N = values.new_zeros(len(values))
    if clip:
        distance_N = (_clipped(values, old_N, clip) - returns_N).square()
        clipped_N = (distance_N > (values - returns_N).square()).to(values.dtype)
    means = {
        "value_loss": losses_N,
        "value_mean": values,
        "value_clip_fraction": clipped_N,
        "return_mean": returns_N,
    }
    return LossOutputs(loss=losses_N.sum() / tokens, metrics=token_metrics(means, {}))


def _clipped(values_N: Tensor, old_N: Tensor, clip: float) -> Tensor:
    return old_N + (values_N - old_N).clamp(-clip, clip)
