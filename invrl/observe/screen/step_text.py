"""A step as one line of text: the metrics for a person who watches a training run.
Pure."""

from collections.abc import Mapping

SHOWN = {
    "rollout/reward_mean": "reward",
    "rollout/reward_std": "std",
    "rollout/response_length": "tokens/rollout",
    "rollout/truncated_share": "cut",
    "rollout/distinct_replies": "distinct replies",
    "train/grad_norm": "grad norm",
    "time/rollout_tokens_per_s": "rollout tok/s",
    "time/train_tokens_per_s": "train tok/s",
    "time/step_s": "s/step",
    "time/checkpoint_s": "s/checkpoint",
}
"""Metrics on the screen; all metrics are in metrics.jsonl."""
SHOWN_WITHOUT_ROLLOUTS = {
    "train/loss": "loss",
    "eval/loss": "held-out loss",
    "data/epoch": "epoch",
    "train/tokens_per_s": "tok/s",
}
"""Metrics of a step that has no reward."""


def describe_step(values: Mapping[str, float], failed: Mapping[str, int]) -> str:
    """Describe the screen's metrics, held-out accuracies, and failed rollouts since the
    start of the run."""
    parts = list(metric_texts(values).values())
    for name, value in values.items():
        if name.startswith("eval/") and name.endswith("/accuracy"):
            failures = _describe_eval_failures(name.removesuffix("accuracy"), values)
            parts.append(f"{name} {format_number(value)}{failures}")
    if failed:
        parts.append(failures_text(failed))
    return ", ".join(parts)


def metric_texts(values: Mapping[str, float]) -> dict[str, str]:
    """Return the screen's metrics, such as "reward 0.25", by name."""
    shown = SHOWN if "rollout/reward_mean" in values else SHOWN | SHOWN_WITHOUT_ROLLOUTS
    return {
        name: f"{label} {_format_metric(name, values)}"
        for name, label in shown.items()
        if name in values
    }


def failures_text(failed: Mapping[str, int]) -> str:
    """`failed`: rollouts by reason."""
    by_reason = [f"{reason} {count}" for reason, count in sorted(failed.items())]
    return f"failed {sum(failed.values())} ({' '.join(by_reason)})"


def _describe_eval_failures(prefix: str, values: Mapping[str, float]) -> str:
    """Describe the failed rollouts, which score 0, of the evaluation whose metrics
    begin with `prefix`."""
    num_failed = values.get(f"{prefix}failed", 0.0)
    if not num_failed:
        return ""
    num_samples = values[f"{prefix}samples"]
    return f" ({num_failed:.0f} of {num_samples:.0f} rollouts failed)"


def _format_metric(name: str, values: Mapping[str, float]) -> str:
    if name == "rollout/truncated_share":
        return f"{values[name]:.0%}"
    if name == "rollout/distinct_replies" and "rollout/rollouts" in values:
        return f"{values[name]:.0f} of {values['rollout/rollouts']:.0f}"
    return format_number(values[name])


def format_number(value: float) -> str:
    """Return three digits, or all of a large number."""
    if abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"
