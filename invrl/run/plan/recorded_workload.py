"""The lengths, rates and machine of a recorded run."""

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from invrl.errors import ConfigError
from invrl.run.checkpoints.store_check import check_store
from invrl.run.plan.config import PlanConfig
from invrl.run.plan.workload import RecordedLengths
from invrl.run.settings.config import Config
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.metrics_file import MetricsRow, read_metrics
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types.rollouts import RolloutSummary

_KNOWN_SHARE = 0.9
"""Share of the rollouts whose company is known: beside the last ones ran some that had
not ended when the run was read."""


def read_run(folder: RunFolder) -> tuple[PlanConfig, RecordedLengths]:
    """Return the rates of the run and the lengths of its rollouts. Raises ConfigError
    if the run does not show them."""
    config = load_resolved(folder.config_path)
    if config.run.colocate:
        reason = "its engines and its trainer share GPUs, and cannot work side by side"
        raise _unusable(folder, reason)
    rows = [row for row in read_metrics(folder.metrics_path) if row.get("time/train_s")]
    if any(row.get("time/gpu_turn_s") is not None for row in rows):
        reason = "its engines and its trainer took turns on a GPU, and cannot work side by side"
        raise _unusable(folder, reason)
    if not rows:
        raise _unusable(folder, "it has made no training step")
    check_store(folder.store_path)
    rollouts = read_rollouts(folder.store_path)
    if len(rollouts) < config.rollout.n_samples_per_prompt:
        raise _unusable(folder, f"{len(rollouts)} of its rollouts have sampled tokens")
    return recorded_workload(config, rows, rollouts)


def recorded_workload(
    config: Config, rows: Sequence[MetricsRow], rollouts: Sequence[RolloutSummary]
) -> tuple[PlanConfig, RecordedLengths]:
    """Return the rates of a run with these training steps, and the lengths of these
    rollouts, which are in the order of their groups. The times of a step are medians.
    The trainer's side of a step is what is neither a wait for rollouts nor a
    checkpoint."""
    eval_engines = config.rollout.eval.engines or 0
    num_engines = config.engine.total_engines - eval_engines
    token_s, request_s = engine_rates(rollouts, num_engines)
    lengths = paced_lengths(rollouts, num_engines, token_s=token_s, request_s=request_s)
    group_size = config.rollout.n_samples_per_prompt
    groups = [
        lengths[first : first + group_size]
        for first in range(0, len(lengths) - group_size + 1, group_size)
    ]
    training_s = _median(rows, "time/train_s")
    waits_s = _median(rows, "time/rollout_s")
    rates: dict[str, object] = {
        "length_mean": statistics.fmean(rollout.sampled_tokens for rollout in rollouts),
        "rollout_batch_size": config.rollout.rollout_batch_size,
        "n_samples_per_prompt": group_size,
        "num_engines": num_engines,
        "eval_engines": eval_engines,
        "engine_gpus": config.engine.tp_size,
        "trainer_gpus": config.num_ranks,
        "token_s": token_s,
        "request_s": request_s,
        "training_s": training_s,
        "update_s": max(0.0, _median(rows, "time/step_s") - waits_s - training_s),
        "when_stale": config.buffer.when_stale,
    }
    return PlanConfig.model_validate(rates), RecordedLengths(groups)


def engine_rates(
    rollouts: Sequence[RolloutSummary], num_engines: int
) -> tuple[float, float]:
    """Return the seconds of an engine's step with one request, and those that each
    further request adds, which are not more: the least-squares fit of the rollouts'
    seconds by their tokens and by the mean number of rollouts beside them. Prefills and
    the environment's time count as an engine's."""
    company = _Company(rollouts, num_engines)
    tokens_N = company.tokens_N
    causes = np.stack([tokens_N, tokens_N * (1 + company.further_N)], axis=1)
    is_known_N = company.is_known_N
    (constant_s, request_s), _ = nnls(causes[is_known_N], company.seconds_N[is_known_N])
    return float(constant_s + request_s), float(request_s)


def paced_lengths(
    rollouts: Sequence[RolloutSummary],
    num_engines: int,
    *,
    token_s: float,
    request_s: float,
) -> list[float]:
    """Return how many tokens an engine with these rates makes in each rollout's time,
    if its company is known, and otherwise its tokens. Rollouts of equally many tokens
    take different times, because of their turns, prefills and environment, and a batch
    waits for the slowest of them."""
    company = _Company(rollouts, num_engines)
    paced_N = company.seconds_N / (token_s + request_s * company.further_N)
    return np.where(company.is_known_N, paced_N, company.tokens_N).tolist()


class _Company:
    """Tokens and seconds of each rollout, and the mean number of further requests that
    its engine had in them."""

    def __init__(self, rollouts: Sequence[RolloutSummary], num_engines: int) -> None:
        starts_N = np.array([rollout.started_at for rollout in rollouts])
        ends_N = np.array([rollout.finished_at for rollout in rollouts])
        self.tokens_N = np.array(
            [float(rollout.sampled_tokens) for rollout in rollouts]
        )
        self.seconds_N = np.maximum(ends_N - starts_N, 1e-9)
        self.is_known_N = ends_N <= np.quantile(ends_N, _KNOWN_SHARE)
        times_T, inverse_T = np.unique(
            np.concatenate([starts_N, ends_N]), return_inverse=True
        )
        changes_T = np.zeros(len(times_T))
        np.add.at(changes_T, inverse_T, np.repeat([1.0, -1.0], len(rollouts)))
        running_T = np.cumsum(changes_T)
        rollout_s_T = np.concatenate(
            [[0.0], np.cumsum(running_T[:-1] * np.diff(times_T))]
        )
        passed_N = np.interp(ends_N, times_T, rollout_s_T)
        passed_N -= np.interp(starts_N, times_T, rollout_s_T)
        running_N = passed_N / self.seconds_N / num_engines
        self.further_N = np.maximum(0.0, running_N - 1)


def read_rollouts(store_path: Path) -> list[RolloutSummary]:
    """Return the finished training rollouts that sampled tokens, group by group."""
    found: list[RolloutSummary] = []
    with contextlib.closing(RunStore(store_path)) as store:
        last_row = 0
        while outcomes := store.outbox_after(last_row):
            last_row, _ = outcomes[-1]
            for _, outcome in outcomes:
                if isinstance(outcome, RolloutSummary) and outcome.sampled_tokens:
                    found.append(outcome)
    first_seen = {rollout.group_id: place for place, rollout in enumerate(found)}
    return sorted(found, key=lambda rollout: first_seen[rollout.group_id])


def _median(rows: Sequence[MetricsRow], name: str) -> float:
    return statistics.median(row.get(name) or 0.0 for row in rows)


def _unusable(folder: RunFolder, reason: str) -> ConfigError:
    fix = "give another run, or its lengths and rates as flags (invrl plan --help)"
    return ConfigError("RUN", str(folder.path), reason, fix)
