"""What the HTML report of a run says, read from its folder: a live, ended or failed
run, also one whose parts are missing or damaged. What cannot be read becomes a note."""

from __future__ import annotations

import importlib.metadata
import sqlite3
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import invrl
from invrl.errors import InvrlError
from invrl.observe.report import (
    EVAL_PREFIX,
    EVAL_SUFFIX,
    REWARD,
    curve,
    eval_names,
    reward_band,
    titles,
    trainer_memory,
)
from invrl.observe.report_chart import Chart, Line
from invrl.observe.report_page import (
    ChangedSetting,
    FailedReason,
    FailureExample,
    Gain,
    ReportContents,
)
from invrl.observe.run_status import RunReader, RunStatus
from invrl.observe.samples import Sample, read_samples
from invrl.observe.step_text import format_number
from invrl.rollout.evaluation import EXACT_REWARD, bootstrap_interval
from invrl.run.config import Config, default_settings, resolve
from invrl.store.metrics_file import MetricsRow
from invrl.store.run_folder import RunFolder

_NUM_EXAMPLES = 3
_LOG_LINES = 25
_PACKAGES = ("torch", "sglang", "megatron-core", "ray", "transformers")
_CURVES = {
    "train/loss": "loss",
    "eval/loss": "held-out loss",
    "rollout/response_length": "tokens per rollout",
    "rollout/staleness_mean": "staleness, in versions",
    "train/kl_reference": "KL to the reference",
    "train/entropy": "entropy",
    "train/clip_fraction": "share of clipped tokens",
    "train/rollout_logprob_gap_mean": "log-prob gap between engine and trainer",
    "train/grad_norm": "gradient norm",
    "time/step_s": "seconds per step",
    "time/rollout_tokens_per_s": "rollout tokens per second",
}
"""Charts of one metric, those that the run has."""


def read_contents(
    folder: RunFolder, config: Config | None, commands: Sequence[tuple[str, str]]
) -> ReportContents:
    """`config`: None if it cannot be read any more. `commands`: what can be done next,
    with its purpose."""
    status = RunReader(folder).read()
    notes = list(status.notes)
    if config is None:
        notes.append(
            "settings cannot be shown: config.resolved.toml is missing, damaged or of another version"
        )
    samples: list[Sample] = []
    if folder.store_path.exists():
        try:
            rules = {} if config is None else config.buffer.failure_rules()
            samples = read_samples(folder.store_path, rules)
        except (InvrlError, sqlite3.Error, OSError) as error:
            notes.append(f"rollouts cannot be read: {error}")
    memory = trainer_memory(folder.path)
    if memory:
        notes.append(memory)
    above = titles(folder.path)
    return ReportContents(
        title=above.title,
        subtitle=above.subtitle or f"run {folder.path.name}",
        state=_state_text(status),
        notes=notes,
        charts=list(_charts(status.rows)),
        gains=_gains(status.rows, samples),
        failures=_failures(samples),
        settings=[] if config is None else _changed_settings(config),
        versions=_versions(),
        commands=commands,
        log_end=_log_end(folder) if status.state == "stopped" else "",
    )


def _state_text(status: RunStatus) -> str:
    steps = f"{status.steps_made} of {status.num_steps or 'unknown'} steps"
    if status.state == "running":
        return f"It is running, after {steps}."
    if status.state == "ended":
        return f"It has ended, after {steps}."
    return f"It stopped before its end, after {steps}: it failed, was killed or was interrupted."


def _charts(rows: Sequence[MetricsRow]) -> Iterator[Chart]:
    steps, values = curve(rows, REWARD)
    if steps:
        band_steps, low, high = reward_band(rows)
        label = f"mean {_first_and_last(values)}, ± a standard deviation within the lowest and the highest"
        line = Line(
            label=label,
            steps=steps,
            values=values,
            band_steps=band_steps,
            low=low,
            high=high,
        )
        yield Chart(title="training reward", lines=[line])
    lines = [
        line
        for name in eval_names(rows)
        if (line := _held_out_line(rows, name)) is not None
    ]
    if lines:
        yield Chart(title="held-out accuracy, 95 % interval", lines=lines)
    for name, title in _CURVES.items():
        steps, values = curve(rows, name)
        if steps:
            line = Line(
                label=f"{name} {_first_and_last(values)}", steps=steps, values=values
            )
            yield Chart(title=title, lines=[line])


def _held_out_line(rows: Sequence[MetricsRow], name: str) -> Line | None:
    steps, values = curve(rows, name)
    if not steps:
        return None
    lows = dict(zip(*curve(rows, f"{name}_low"), strict=True))
    highs = dict(zip(*curve(rows, f"{name}_high"), strict=True))
    band_steps = [step for step in steps if step in lows and step in highs]
    return Line(
        label=f"{_mode(name)} {_first_and_last(values)}",
        steps=steps,
        values=values,
        band_steps=band_steps,
        low=[lows[step] for step in band_steps],
        high=[highs[step] for step in band_steps],
    )


def _mode(name: str) -> str:
    return name.removeprefix(EVAL_PREFIX).removesuffix(EVAL_SUFFIX)


def _first_and_last(values: Sequence[float]) -> str:
    if len(values) == 1:
        return format_number(values[0])
    return f"{format_number(values[0])} → {format_number(values[-1])}"


def _gains(rows: Sequence[MetricsRow], samples: Sequence[Sample]) -> list[Gain]:
    rewards = _rewards_of_evaluations(samples)
    gains: list[Gain] = []
    for name in eval_names(rows):
        steps, values = curve(rows, name)
        if not steps:
            continue
        _, lows = curve(rows, f"{name}_low")
        _, highs = curve(rows, f"{name}_high")
        interval = None
        num_tasks = None
        before = rewards.get((_mode(name), steps[0]), {})
        after = rewards.get((_mode(name), steps[-1]), {})
        if after:
            num_tasks = len(after)
        if before and before.keys() == after.keys() and steps[0] != steps[-1]:
            change_K = np.array(
                [
                    _accuracy(after[task]) - _accuracy(before[task])
                    for task in sorted(after)
                ]
            )
            bounds = bootstrap_interval(change_K)
            interval = (bounds.low, bounds.high)
        gains.append(
            Gain(
                name=_mode(name),
                first_step=steps[0],
                last_step=steps[-1],
                before=values[0],
                after=values[-1],
                after_interval=(lows[-1], highs[-1]) if lows and highs else None,
                gain_interval=interval,
                num_tasks=num_tasks,
            )
        )
    return gains


def _rewards_of_evaluations(
    samples: Sequence[Sample],
) -> Mapping[tuple[str, int], Mapping[str, Sequence[float]]]:
    """By mode and step, then by task."""
    rewards: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for sample in samples:
        if (
            sample.purpose == "eval"
            and sample.step is not None
            and sample.reward is not None
        ):
            rewards[sample.evaluation, sample.step][sample.identity.task_id].append(
                sample.reward
            )
    return rewards


def _accuracy(rewards: Sequence[float]) -> float:
    return sum(reward >= EXACT_REWARD for reward in rewards) / len(rewards)


def _failures(samples: Sequence[Sample]) -> list[FailedReason]:
    """The most frequent reason first; of each the messages that most failures end
    with."""
    by_reason: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.failure is not None:
            by_reason[sample.failure.value].append(sample)
    failures: list[FailedReason] = []
    for reason, failed in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        last_lines = Counter(_last_line(sample) for sample in failed)
        examples: list[FailureExample] = []
        for line, count in last_lines.most_common(_NUM_EXAMPLES):
            example = next(
                sample for sample in reversed(failed) if _last_line(sample) == line
            )
            task_id = example.identity.task_id
            examples.append(
                FailureExample(task_id=task_id, count=count, detail=example.detail)
            )
        failures.append(
            FailedReason(reason=reason, count=len(failed), examples=examples)
        )
    return failures


def _last_line(sample: Sample) -> str:
    return sample.detail.strip().rpartition("\n")[2]


def _changed_settings(config: Config) -> list[ChangedSetting]:
    """The settings that differ from their defaults; those of an optional table from the
    defaults of a table that is there."""
    defaults: Mapping[str, Mapping[str, Any]] = resolve().settings()
    changed: list[ChangedSetting] = []
    for table, entries in config.settings().items():
        of_table = defaults.get(table)
        if of_table is None:
            of_table = default_settings(table)
        for key, value in entries.items():
            default = of_table.get(key)
            if value != default:
                default_text = "" if default is None else str(default)
                changed.append(
                    ChangedSetting(
                        name=f"{table}.{key}", value=str(value), default=default_text
                    )
                )
    return changed


def _versions() -> list[tuple[str, str]]:
    versions = [("invrl", invrl.__version__)]
    commit = _commit()
    if commit:
        versions.append(("commit of invrl", commit))
    for package in _PACKAGES:
        try:
            versions.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            versions.append((package, "not installed"))
    return versions


def _commit() -> str:
    """Of the checkout that invrl is imported from; "" if it is installed elsewhere."""
    root = Path(invrl.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10.0,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _log_end(folder: RunFolder) -> str:
    try:
        content = folder.log_path("driver").read_bytes()[-100_000:]
    except OSError:
        return ""
    return "\n".join(content.decode(errors="replace").splitlines()[-_LOG_LINES:])
