"""Detects a collapsed policy: it gives the same reply to a task every time, so that all
rewards of a group are equal and nothing can be learnt.

Its training reward still varies with the tasks, but no step changes a weight. Pure:
judges rows of metrics, for console, report and overview.
"""

from collections.abc import Mapping, Sequence

_STEPS = 3
"""Consecutive steps without a difference: one may be chance."""
COLLAPSE_METRICS = (
    "rollout/distinct_replies",
    "rollout/rollouts",
    "rollout/groups",
    "rollout/group_reward_std",
    "rollout/reward_min",
    "rollout/reward_max",
    "train/entropy",
)
"""Metrics of a row that `collapse` reads."""
Row = Mapping[str, float | None]


def collapse(rows: Sequence[Row]) -> str:
    """Describe what happened and what helps, if the policy has collapsed in the last of
    these rows; "" otherwise. Rows of steps without rollouts are ignored."""
    steps = [
        row
        for row in rows
        if row.get("rollout/distinct_replies") is not None and row.get("rollout/groups")
    ]
    first = len(steps)
    while first and _has_one_reply_per_task(steps[first - 1]):
        first -= 1
    alike = steps[first:]
    if (
        len(alike) < _STEPS or not first
    ):  # a policy that began this way has not collapsed
        return ""
    best_reward = max(row.get("rollout/reward_max") or 0.0 for row in steps)
    if all((row.get("rollout/reward_min") or 0.0) >= best_reward for row in alike):
        return ""  # the tasks are solved
    begin = int(alike[0].get("step") or 0)
    last = alike[-1]
    distinct = f"{last['rollout/distinct_replies']:.0f} distinct replies of {last['rollout/rollouts']:.0f}"
    return (
        f"the policy has collapsed: since step {begin} it gives one reply to each task ({distinct}"
        f"{_entropies(steps[0], last)}), so every group has equal rewards and nothing can be learnt. It does "
        f"not come back by itself: begin again from the model of a step before {begin} with a lower learning "
        "rate (--lr), a KL to the reference (--kl.coefficient) or an entropy bonus (--entropy.coefficient)"
    )


def _has_one_reply_per_task(row: Row) -> bool:
    distinct = row.get("rollout/distinct_replies") or 0.0
    groups = row.get("rollout/groups") or 0.0
    rollouts = row.get("rollout/rollouts") or 0.0
    return distinct <= groups < rollouts and row.get("rollout/group_reward_std") == 0.0


def _entropies(before: Row, now: Row) -> str:
    first, last = before.get("train/entropy"), now.get("train/entropy")
    if first is None or last is None:
        return ""
    return f", entropy {first:.2g} -> {last:.2g} nats"
