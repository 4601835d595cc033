"""KL of whole rollouts in the compared rewards, if `kl.added_to` is `rollout_reward`.

A rollout's reward is then r - coefficient KL, with KL the sum of the estimates over its
trained tokens, in all its samples; its advantage is that of these rewards (RLOO, arXiv
2402.14740, section 2; like TRL's RLOO). Advantages were computed from r when the batch
was taken. Those of `LINEAR` are additive, so the advantages of -coefficient KL are
added here. Imported after `device.prepare()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from invrl.algorithms.advantages.advantages import advantage_function
from invrl.algorithms.config import AlgorithmConfig
from invrl.train.batches.sharding import Shard
from invrl.train.model.pipeline_schedule import SampleNumbers
from invrl.train.parallel.process_group import gather_from_replicas
from invrl.train.step.advantage_estimation import divergence
from invrl.train.step.prepared_batch import BatchWithAdvantages
from invrl.types.batches import TrainBatch
from invrl.types.metrics import Mean


@dataclass(frozen=True, slots=True)
class SampleKl:
    """KL(old || reference) of a sample in nats, summed over its trained tokens."""

    group_id: str
    rollout_id: str
    kl: float


def with_rollout_kl(
    shard: Shard,
    *,
    old: Sequence[SampleNumbers],
    reference: Sequence[SampleNumbers | None],
    config: AlgorithmConfig,
) -> BatchWithAdvantages:
    """Add the KL to the advantages of a batch without critic. `old` and `reference` are
    log-probs, one entry per mini-batch. The data-parallel ranks call it together: the
    rollouts of a group may be on several of them."""
    assert config.kl is not None
    samples: list[SampleKl] = []
    num_tokens = 0
    for mini_batch, old_of_step, reference_of_step in zip(
        shard, old, reference, strict=True
    ):
        assert reference_of_step is not None, "the KL needs a reference"
        for sample, old_T, reference_T in zip(
            mini_batch.samples, old_of_step, reference_of_step, strict=True
        ):
            if not sample.loss_mask_T.any():
                continue
            kl = float(divergence(sample, old_T, reference_T, config.kl).sum())
            samples.append(SampleKl(sample.group_id, sample.rollout_id, kl))
            num_tokens += int(sample.loss_mask_T.sum())
    of_all_ranks = [
        sample
        for samples_of_rank in gather_from_replicas(samples)
        for sample in samples_of_rank
    ]
    advantage_of = kl_advantages(of_all_ranks, config)
    changed: list[TrainBatch] = []
    for mini_batch in shard:
        advantages = tuple(
            (
                advantages_T
                + advantage_of.get(sample.rollout_id, 0.0) * sample.loss_mask_T
            ).astype(np.float32)
            for sample, advantages_T in zip(
                mini_batch.samples, mini_batch.advantages, strict=True
            )
        )
        changed.append(replace(mini_batch, advantages=advantages))
    kl = Mean(sum(sample.kl for sample in samples), num_tokens)
    return BatchWithAdvantages(
        shard=tuple(changed),
        targets=[None] * len(changed),
        metrics={"kl_in_reward": kl},
    )


def kl_advantages(
    samples: Iterable[SampleKl], config: AlgorithmConfig
) -> Mapping[str, float]:
    """Return, by rollout id, the advantage of the reward -coefficient KL among those of
    its group that have a trained token."""
    kl_by_group: dict[str, dict[str, float]] = {}
    for sample in samples:
        of_group = kl_by_group.setdefault(sample.group_id, {})
        of_group[sample.rollout_id] = of_group.get(sample.rollout_id, 0.0) + sample.kl
    assert config.kl is not None
    compare = advantage_function(config.advantage)
    advantage_of: dict[str, float] = {}
    for of_group in kl_by_group.values():
        rewards_G = -config.kl.coefficient * np.array(list(of_group.values()))
        advantage_of |= dict(
            zip(
                of_group,
                compare(rewards_G, eps=config.advantage_std.eps).tolist(),
                strict=True,
            )
        )
    return advantage_of
