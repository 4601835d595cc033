"""The metrics of one step of the loop, from the types of the pipeline. Pure.

`rollout/` describes the rollouts, `sync/` the weight update, `time/` the seconds per
phase. The trainer makes the metrics below `train/`, the buffer those below `buffer/`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.metrics import Max, Mean, Metric, Min, Sum
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightUpdate

CHECKPOINT_PHASE = "checkpoint"
"""Loop's name of the phase in which a checkpoint is written."""


def rollout_metrics(taken: TakenBatch) -> dict[str, Metric]:
    """Return reward, lengths, cache and staleness of the rollouts that are trained in
    this step.

    `truncated_share` is the share of rollouts in which a reply ran out of tokens.
    `delivered_fraction`, `trained_fraction` and `auxiliary_fraction` are of sampled
    tokens. `later_cached_fraction` covers the prompts of every turn after the first:
    the radix cache's saving in a continued conversation. `failed_share/<reason>` are
    failures that count with a reward. `forks/<reason>`, `matches/<level>`,
    `thinking_kept_tokens`, `control_tokens_as_text` and `forked_tokens` are the
    gateway's counts.
    """
    rollouts = _taken_rollouts(taken)
    return {
        **_reward_metrics(taken, rollouts),
        **_length_metrics(rollouts),
        **_staleness_metrics(taken, rollouts),
        **_named_metrics(rollouts),
    }


def _taken_rollouts(taken: TakenBatch) -> list[RolloutSummary]:
    return [rollout for group in taken.groups for rollout in group.rollouts_G]


def _reward_metrics(
    taken: TakenBatch, rollouts: Sequence[RolloutSummary]
) -> dict[str, Metric]:
    rewards = [rollout.reward for rollout in rollouts]
    group_deviations: list[float] = []
    for group in taken.groups:
        group_rewards = [rollout.reward for rollout in group.rollouts_G]
        group_deviations.append(_deviation(group_rewards))
    return {
        "reward_mean": _mean(rewards),
        "reward_std": Mean(_deviation(rewards)),
        "reward_min": Min(min(rewards, default=0.0)),
        "reward_max": Max(max(rewards, default=0.0)),
        "group_reward_std": _mean(group_deviations),
        "groups": Sum(len(taken.groups)),
        "rollouts": Sum(len(rollouts)),
    }


def _length_metrics(rollouts: Sequence[RolloutSummary]) -> dict[str, Metric]:
    num_turns = [rollout.num_turns for rollout in rollouts]
    sampled = [rollout.sampled_tokens for rollout in rollouts]
    is_truncated = [float(rollout.truncated) for rollout in rollouts]
    return {
        "turns": _mean(num_turns),
        "response_length": _mean(sampled),
        "response_length_max": Max(float(max(sampled, default=0))),
        "truncated_share": _mean(is_truncated),
        "cached_fraction": _ratio((r.cached_tokens, r.prompt_tokens) for r in rollouts),
        "later_cached_fraction": _ratio(
            (r.later_cached_tokens, r.later_prompt_tokens) for r in rollouts
        ),
        "delivered_fraction": _ratio(
            (r.delivered_tokens, r.sampled_tokens) for r in rollouts
        ),
        "trained_fraction": _ratio(
            (r.trained_tokens, r.sampled_tokens) for r in rollouts
        ),
        "auxiliary_fraction": _ratio(
            (r.auxiliary_tokens, r.sampled_tokens) for r in rollouts
        ),
        "sampled_tokens": Sum(sum(sampled)),
    }


def _staleness_metrics(
    taken: TakenBatch, rollouts: Sequence[RolloutSummary]
) -> dict[str, Metric]:
    staleness = [float(taken.version - rollout.oldest_version) for rollout in rollouts]
    seconds = [rollout.finished_at - rollout.started_at for rollout in rollouts]
    num_forks = sum(rollout.forks for rollout in rollouts)
    return {
        "forks": Sum(num_forks),
        "staleness_mean": _mean(staleness),
        "staleness_max": Max(max(staleness, default=0.0)),
        "seconds_mean": _mean(seconds),
    }


def _named_metrics(rollouts: Sequence[RolloutSummary]) -> dict[str, Metric]:
    """Return metrics whose names come from the rollouts: failures, the gateway's
    counts, reward components."""
    failures: set[str] = set()
    count_names: set[str] = set()
    component_names: set[str] = set()
    for rollout in rollouts:
        if rollout.failure:
            failures.add(rollout.failure)
        count_names.update(rollout.counts)
        component_names.update(rollout.reward_components)
    metrics: dict[str, Metric] = {}
    for reason in sorted(failures):
        has_failed = [float(rollout.failure == reason) for rollout in rollouts]
        metrics[f"failed_share/{reason}"] = _mean(has_failed)
    for name in sorted(count_names):
        counts = [rollout.counts.get(name, 0) for rollout in rollouts]
        metrics[name] = Sum(sum(counts))
    for name in sorted(component_names):
        values: list[float] = []
        for rollout in rollouts:
            if name in rollout.reward_components:
                values.append(rollout.reward_components[name])
        metrics[f"reward/{name}"] = _mean(values)
    return metrics


def _ratio(pairs: Iterable[tuple[int, int]]) -> Mean:
    """Return the sum of the parts over the sum of the wholes."""
    total = Mean(0.0, 0.0)
    for part, whole in pairs:
        total = total + Mean(part, whole)
    return total


def _mean(values: Sequence[float]) -> Mean:
    return Mean(float(sum(values)), float(len(values)))


def _deviation(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return statistics.pstdev(values)


def reply_metrics(batch: TrainBatch) -> dict[str, Metric]:
    """Count the batch's rollouts that sampled different tokens, over all of its tasks:
    the number of rollouts if no two are equal, 1 if the policy has collapsed to one
    reply. Only trained tokens count: all that a rollout sampled except replies that its
    client never got."""
    replies: dict[str, list[bytes]] = {}
    for sample in batch.samples:
        trained_T = sample.tokens_T[sample.loss_mask_T]
        replies.setdefault(sample.rollout_id, []).append(trained_T.tobytes())
    distinct = {tuple(reply) for reply in replies.values()}
    return {"distinct_replies": Sum(len(distinct))}


def token_age_metrics(batch: TrainBatch) -> dict[str, Metric]:
    """Return the ages of the batch's tokens in weight versions: mean, 99th percentile
    and the share beyond `max_staleness`; and how many tokens and samples are not
    trained for their age. Empty if no engine sampled the batch."""
    ages = batch.ages
    if ages is None:
        return {}
    return {
        "token_age_mean": Mean(ages.total_age, ages.num_tokens),
        "token_age_p99": Max(ages.percentile(99)),
        "token_age_beyond_share": Mean(ages.num_beyond, ages.num_tokens),
        "tokens_masked": Sum(ages.masked_tokens),
        "samples_masked": Sum(ages.masked_samples),
    }


def shaping_metrics(batch: TrainBatch) -> dict[str, Metric]:
    """Return the effect of shaping on the final rewards of the trained rollouts:
    `reward_shaping_mean`, `reward_shaping_min`, `reward_shaping_max`, and
    `reward_shaped_share`, the share of rollouts whose reward it changed. Empty if
    rewards are not shaped."""
    term_of: dict[str, float] = {}
    for sample in batch.samples:
        if "reward_shaping" in sample.numbers:
            term_of[sample.rollout_id] = sample.numbers["reward_shaping"]
    if not term_of:
        return {}
    terms = list(term_of.values())
    return {
        "reward_shaping_mean": _mean(terms),
        "reward_shaping_min": Min(min(terms)),
        "reward_shaping_max": Max(max(terms)),
        "reward_shaped_share": _mean([float(term != 0) for term in terms]),
    }


def update_metrics(update: WeightUpdate) -> dict[str, Metric]:
    """Return the weight update's version, bytes, canary gaps, and seconds per phase and
    of the pause."""
    metrics: dict[str, Metric] = {
        "version": Max(float(update.version)),
        "bytes": Sum(float(update.num_bytes)),
        "canary_max_gap": Max(update.canary_max_gap),
        "canary_mean_gap": Mean(update.canary_mean_gap),
    }
    for phase, seconds in update.seconds.items():
        metrics[f"{phase}_s"] = Sum(seconds)
    return metrics


def time_metrics(
    seconds: Mapping[str, float], taken: TakenBatch, trained_tokens: float
) -> dict[str, Metric]:
    """Return the seconds per phase of the step, and the tokens per second of rollout
    and training.

    `step_s` excludes the checkpoint, which few steps write; that is in `checkpoint_s`.
    Rollout tokens/s covers the wall time from the first to the last turn of the batch,
    so it also holds if rollouts overlap training. Train tokens/s counts trained tokens
    over the train phase.
    """
    metrics: dict[str, Metric] = {
        f"{phase}_s": Sum(value) for phase, value in seconds.items()
    }
    step_seconds = [
        value for phase, value in seconds.items() if phase != CHECKPOINT_PHASE
    ]
    metrics["step_s"] = Sum(sum(step_seconds))
    rollouts = _taken_rollouts(taken)
    if rollouts:
        first_start = min(rollout.started_at for rollout in rollouts)
        last_finish = max(rollout.finished_at for rollout in rollouts)
        duration_s = max(last_finish - first_start, 1e-9)
        sampled_tokens = sum(rollout.sampled_tokens for rollout in rollouts)
        metrics["rollout_tokens_per_s"] = Mean(sampled_tokens, duration_s)
    if seconds.get("train"):
        metrics["train_tokens_per_s"] = Mean(trained_tokens, seconds["train"])
    return metrics
