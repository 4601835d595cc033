"""What one step of the loop measured, as metric values: pure, from the types of the pipeline.
Names: `rollout/` what was sampled, `sync/` the weight update, `time/` seconds per phase. The
trainer's own (`train/`) and the buffer's (`buffer/`) come from them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from invrl.metrics import Max, Mean, Metric, Min, Sum
from invrl.types import RolloutSummary, TakenBatch, TrainBatch, WeightUpdate

CHECKPOINT_PHASE = "checkpoint"
"""The loop's name of the phase in which a checkpoint is written."""


def _ratio(pairs: Iterable[tuple[int, int]]) -> Mean:
    """Of the sums of part and whole."""
    return sum((Mean(part, whole) for part, whole in pairs), Mean(0.0, 0.0))


def _mean(values: Sequence[float]) -> Mean:
    return Mean(float(sum(values)), float(len(values)))


def _deviation(values: Sequence[float]) -> float:
    return statistics.pstdev(values) if values else 0.0


def rollout_metrics(taken: TakenBatch) -> dict[str, Metric]:
    """Reward, lengths, cache and staleness of the rollouts that are trained in this step.
    `truncated_share` is the share of rollouts in which a reply ran out of tokens.
    `delivered_fraction`, `trained_fraction` and `auxiliary_fraction` are of sampled tokens.
    `later_cached_fraction` is over the prompts of every turn after the first: what the radix cache
    saved of a conversation that continues. `failed_share/<reason>` are failures that count with a reward.
    `forks/<reason>`, `matches/<level>`, `thinking_kept_tokens` and
    `forked_tokens` are the gateway's counts."""
    rollouts: list[RolloutSummary] = [r for group in taken.groups for r in group.rollouts_G]
    rewards = [r.reward for r in rollouts]
    metrics: dict[str, Metric] = {
        "reward_mean": _mean(rewards),
        "reward_std": Mean(_deviation(rewards)),
        "reward_min": Min(min(rewards, default=0.0)),
        "reward_max": Max(max(rewards, default=0.0)),
        "group_reward_std": _mean([_deviation([r.reward for r in g.rollouts_G]) for g in taken.groups]),
        "groups": Sum(len(taken.groups)),
        "rollouts": Sum(len(rollouts)),
        "turns": _mean([r.num_turns for r in rollouts]),
        "response_length": _mean([r.sampled_tokens for r in rollouts]),
        "response_length_max": Max(float(max((r.sampled_tokens for r in rollouts), default=0))),
        "truncated_share": _mean([float(r.truncated) for r in rollouts]),
        "cached_fraction": _ratio((r.cached_tokens, r.prompt_tokens) for r in rollouts),
        "later_cached_fraction": _ratio((r.later_cached_tokens, r.later_prompt_tokens) for r in rollouts),
        "delivered_fraction": _ratio((r.delivered_tokens, r.sampled_tokens) for r in rollouts),
        "trained_fraction": _ratio((r.trained_tokens, r.sampled_tokens) for r in rollouts),
        "auxiliary_fraction": _ratio((r.auxiliary_tokens, r.sampled_tokens) for r in rollouts),
        "forks": Sum(sum(r.forks for r in rollouts)),
        "staleness_mean": _mean([float(taken.version - r.oldest_version) for r in rollouts]),
        "staleness_max": Max(float(max((taken.version - r.oldest_version for r in rollouts), default=0))),
        "seconds_mean": _mean([r.finished_at - r.started_at for r in rollouts]),
        "sampled_tokens": Sum(sum(r.sampled_tokens for r in rollouts)),
    }
    for reason in sorted({r.failure for r in rollouts if r.failure}):
        metrics[f"failed_share/{reason}"] = _mean([float(r.failure == reason) for r in rollouts])
    for name in sorted({name for r in rollouts for name in r.counts}):
        metrics[name] = Sum(sum(r.counts.get(name, 0) for r in rollouts))
    for name in sorted({name for r in rollouts for name in r.reward_components}):
        values = [r.reward_components[name] for r in rollouts if name in r.reward_components]
        metrics[f"reward/{name}"] = _mean(values)
    return metrics


def reply_metrics(batch: TrainBatch) -> dict[str, Metric]:
    """How many of the batch's rollouts sampled different tokens, over all of its tasks: as many as there are
    where each says something of its own, 1 where the policy has collapsed to one reply. Only trained tokens
    count: all that a rollout sampled, but for replies that its client never got."""
    parts: dict[str, list[bytes]] = {}
    for sample in batch.samples:
        trained_T = sample.tokens_T[sample.loss_mask_T]
        parts.setdefault(sample.rollout_id, []).append(trained_T.tobytes())
    distinct = len({tuple(of_rollout) for of_rollout in parts.values()})
    return {"distinct_replies": Sum(distinct)}


def update_metrics(update: WeightUpdate) -> dict[str, Metric]:
    """The weight update: bytes, seconds per phase, how long generation stood still, the canary."""
    return {
        "version": Max(float(update.version)),
        "bytes": Sum(float(update.num_bytes)),
        "canary_max_gap": Max(update.canary_max_gap),
        "canary_mean_gap": Mean(update.canary_mean_gap),
        **{f"{phase}_s": Sum(seconds) for phase, seconds in update.seconds.items()},
    }


def time_metrics(seconds: Mapping[str, float], taken: TakenBatch, trained_tokens: float) -> dict[str, Metric]:
    """Seconds per phase of the step, and tokens per second of either half. `step_s` is without the
    checkpoint, which few steps write: `checkpoint_s` stands beside it. Rollout tokens/s is over
    the wall time from the first to the last turn of the batch, so it also holds when rollouts overlap
    training; train tokens/s counts trained tokens over the train phase."""
    rollouts = [r for group in taken.groups for r in group.rollouts_G]
    metrics: dict[str, Metric] = {f"{phase}_s": Sum(value) for phase, value in seconds.items()}
    metrics["step_s"] = Sum(sum(value for phase, value in seconds.items() if phase != CHECKPOINT_PHASE))
    if rollouts:
        wall = max(r.finished_at for r in rollouts) - min(r.started_at for r in rollouts)
        metrics["rollout_tokens_per_s"] = Mean(sum(r.sampled_tokens for r in rollouts), max(wall, 1e-9))
    if seconds.get("train"):
        metrics["train_tokens_per_s"] = Mean(trained_tokens, seconds["train"])
    return metrics
