"""Advantages and returns of a batch from its token rewards, the policies' log-probs and
the critic's values, if there is a critic.

The formulas are those of `algorithms/advantages/token_advantages.py`; here they are
applied to the batch of a rank. Advantages are whitened over all mini-batches of the
batch and over the data-parallel ranks, so they depend neither on the number of ranks
nor on how samples were divided among them. On a pipeline stage without values the
result is meaningless, and is not used. Imported after `device.prepare()`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from invrl.algorithms.advantages.token_advantages import (
    TokenAdvantages,
    gae,
    length_adaptive_lambda,
    v_trace,
)
from invrl.algorithms.advantages.whitening import Moments, whiten
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.policy_loss.kl import estimate
from invrl.algorithms.policy_loss.ratios import LOG_RATIO_BOUND
from invrl.algorithms.tables import CriticConfig, KlConfig
from invrl.train.batches.sharding import Shard
from invrl.train.critic.critic import Targets
from invrl.train.model.pipeline_schedule import SampleNumbers
from invrl.train.parallel.process_group import sum_over_replicas
from invrl.train.step.prepared_batch import BatchWithAdvantages
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import Max, Mean, Metric

REWARDS = "rewards"
"""Column of a sample with the reward of each token."""


def estimate_advantages(
    shard: Shard,
    values: Sequence[SampleNumbers] | None,
    *,
    old: Sequence[SampleNumbers],
    reference: Sequence[SampleNumbers | None],
    config: AlgorithmConfig,
) -> BatchWithAdvantages:
    """Estimate advantages; all inputs have one entry per mini-batch. `values` is None
    without a critic: the advantage of a token is then the discounted sum of the rewards
    from it on, and there are no targets. `old` has log-probs under the old policy, for
    V-trace and for the KL in the reward. The data-parallel ranks call it together."""
    advantages_by_step: list[list[TokenAdvantages]] = []
    kl = Mean(0.0, 0.0)
    for at, mini_batch in enumerate(shard):
        of_step: list[TokenAdvantages] = []
        for index, sample in enumerate(mini_batch.samples):
            rewards_T = token_rewards(sample)
            frozen = reference[at]
            if (
                config.kl is not None
                and config.kl_in_token_rewards
                and frozen is not None
            ):
                kl_T = divergence(sample, old[at][index], frozen[index], config.kl)
                rewards_T = rewards_T - config.kl.coefficient * kl_T
                kl += Mean(float(kl_T.sum()), int(sample.loss_mask_T.sum()))
            if values is None:
                of_step.append(_without_values(sample, rewards_T, config))
                continue
            of_step.append(
                _of_sample(
                    sample,
                    rewards_T,
                    values[at][index],
                    old[at][index],
                    config.critic or CriticConfig.model_validate({}),
                    discount=config.discount,
                )
            )
        advantages_by_step.append(of_step)
    metrics: dict[str, Metric] = {}
    targets: list[Targets | None] = [None] * len(shard)
    if values is not None:
        metrics = _value_fit_metrics(shard, values, advantages_by_step)
        targets = [
            Targets(
                old=values[at],
                returns=[
                    of_sample.returns_T.astype(np.float32)
                    for of_sample in advantages_by_step[at]
                ],
                tokens=mini_batch.trained.tokens,
            )
            for at, mini_batch in enumerate(shard)
        ]
    if config.kl_in_token_rewards:
        metrics["kl_in_reward"] = kl
    if config.token_level:
        shard = _with_advantages(shard, advantages_by_step, config)
    return BatchWithAdvantages(shard=shard, targets=targets, metrics=metrics)


def token_rewards(sample: TrainSample) -> NDArray[np.float64]:
    """Return the rewards [T] of a sample's tokens: its column, or else its one reward
    at its last trained token."""
    column_T = sample.columns.get(REWARDS)
    if column_T is not None:
        return column_T.astype(np.float64)
    rewards_T = np.zeros(len(sample.tokens_T))
    trained = np.flatnonzero(sample.loss_mask_T)
    rewards_T[trained[-1:]] = sample.reward
    return rewards_T


def divergence(
    sample: TrainSample,
    old_T: NDArray[np.float32],
    frozen_T: NDArray[np.float32],
    settings: KlConfig,
) -> NDArray[np.float64]:
    """Estimate KL(old || reference) per token, [T], within the clamp; 0 for untrained
    tokens."""
    policy_T = torch.from_numpy(old_T).double()
    reference_T = torch.from_numpy(frozen_T).double()
    sampled_T = torch.from_numpy(sample.rollout_logprobs_T).double()
    bound = settings.clamp or math.inf
    kl_T = estimate(settings.estimator, policy_T, reference_T, sampled_T).clamp(
        -bound, bound
    )
    return np.where(sample.loss_mask_T, kl_T.numpy(), 0.0)


def _without_values(
    sample: TrainSample, rewards_T: NDArray[np.float64], config: AlgorithmConfig
) -> TokenAdvantages:
    """Compute REINFORCE++'s advantages, before whitening (arXiv 2501.03262, eq. 4):
    with lambda = 1 and values of 0 GAE is the discounted return."""
    return gae(
        rewards_T,
        np.zeros(len(rewards_T), np.float32),
        sample.loss_mask_T,
        discount=config.discount,
        policy_lambda=1.0,
        critic_lambda=1.0,
    )


def _of_sample(
    sample: TrainSample,
    rewards_T: NDArray[np.float64],
    values_T: NDArray[np.float32],
    old_T: NDArray[np.float32],
    critic: CriticConfig,
    *,
    discount: float,
) -> TokenAdvantages:
    mask_T = sample.loss_mask_T
    if critic.targets == "vtrace":
        gap_T = old_T.astype(np.float64) - sample.rollout_logprobs_T
        return v_trace(
            rewards_T,
            values_T,
            np.exp(gap_T.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)),
            mask_T,
            discount=discount,
            rho_bar=critic.vtrace_rho_cap,
            c_bar=critic.vtrace_c_cap,
            trace_lambda=critic.gae_lambda,
        )
    policy_lambda = critic.gae_lambda
    if critic.length_alpha is not None:
        policy_lambda = length_adaptive_lambda(int(mask_T.sum()), critic.length_alpha)
    return gae(
        rewards_T,
        values_T,
        mask_T,
        discount=discount,
        policy_lambda=policy_lambda,
        critic_lambda=critic.returns_lambda,
    )


def _with_advantages(
    shard: Shard,
    estimates_by_step: Sequence[Sequence[TokenAdvantages]],
    config: AlgorithmConfig,
) -> Shard:
    """Return the shard with these advantages, whitened."""
    advantages_by_step = [
        [estimate.advantages_T for estimate in of_step] for of_step in estimates_by_step
    ]
    moments = _moments(
        shard, advantages_by_step, over_rollouts=config.whitened_over == "rollouts"
    )
    whitened: list[TrainBatch] = []
    for mini_batch, of_step in zip(shard, advantages_by_step, strict=True):
        advantages: list[NDArray[np.float32]] = []
        for sample, advantages_T in zip(mini_batch.samples, of_step, strict=True):
            whitened_T = np.where(
                sample.loss_mask_T,
                whiten(advantages_T, moments, std_floor=config.advantage_std.floor),
                0.0,
            )
            advantages.append(whitened_T.astype(np.float32))
        whitened.append(replace(mini_batch, advantages=tuple(advantages)))
    return tuple(whitened)


def _value_fit_metrics(
    shard: Shard,
    values: Sequence[SampleNumbers],
    advantages_by_step: Sequence[Sequence[TokenAdvantages]],
) -> dict[str, Metric]:
    """Return the explained variance of the returns by the values: 1 is all; below 0,
    the mean of the returns would be a better guess. Nothing for equal returns."""
    returns: list[list[NDArray[np.float64]]] = []
    errors: list[list[NDArray[np.float64]]] = []
    for of_step, values_of_step in zip(advantages_by_step, values, strict=True):
        returns.append([of_sample.returns_T for of_sample in of_step])
        errors.append(
            [
                of_sample.returns_T - values_T
                for of_sample, values_T in zip(of_step, values_of_step, strict=True)
            ]
        )
    of_returns = _moments(shard, returns)
    of_errors = _moments(shard, errors)
    if not of_returns.variance:
        return {}
    return {
        "value_explained_variance": Max(1 - of_errors.variance / of_returns.variance)
    }


def _moments(
    shard: Shard,
    numbers: Sequence[Sequence[NDArray[np.float64]]],
    *,
    over_rollouts: bool = False,
) -> Moments:
    """Compute moments over the trained tokens of all mini-batches and data-parallel
    ranks, from one array [T] per sample. Each token counts once, or each rollout. A
    sample with a number that is not finite is left out, so that it only affects its own
    mini-batch."""
    own = Moments()
    for mini_batch, of_step in zip(shard, numbers, strict=True):
        for sample, numbers_T in zip(mini_batch.samples, of_step, strict=True):
            numbers_N = numbers_T[sample.loss_mask_T]
            if not len(numbers_N) or not np.isfinite(numbers_N).all():
                continue
            weight = 1.0
            if over_rollouts:
                weight = 1 / mini_batch.trained.tokens_of_rollout[sample.rollout_id]
            own += Moments.of(numbers_N, np.full(len(numbers_N), weight))
    count, total, squares = sum_over_replicas([own.count, own.total, own.squares])
    return Moments(count=count, total=total, squares=squares)
