"""`invrl export-data`: writes the best rollouts of a run as a file that `invrl train
--data-path` reads."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from invrl.cli.arguments import read_run_folder, split_options, unknown_flag
from invrl.errors import ConfigError
from invrl.host.printable import for_stdout
from invrl.observe.best_samples import Wanted
from invrl.run.export_data import ExportOptions, ExportReport, export_data

_VALUES = ("--out", "--best", "--labels", "--min-reward", "--steps", "--model-path")
_SWITCHES = ("--pairs", "--inexact", "--overwrite")
_MAX_REFUSALS = 3
"""Different refusals that are shown."""


def export_rollouts(arguments: Sequence[str]) -> None:
    """usage: invrl export-data RUN_FOLDER --out FILE.jsonl [--pairs | --labels R] [--best K]
                                        [--min-reward R] [--steps A:B] [--inexact]
                                        [--model-path FOLDER] [--overwrite]
      --out FILE.jsonl  the file to write, for `invrl train --data-path`
      --pairs           the best and the worst rollout of a group as `chosen` and `rejected` (dpo and
                        its family), in place of conversations (sft)
      --labels R        each conversation gets a label: true from this reward on, false below (kto)
      --best K          rollouts of each task at most (0: all; default: 1, with --labels 0), over all of
                        its epochs; with --pairs: pairs of each task, the largest difference of
                        rewards first
      --min-reward R    only rollouts with at least this reward; with --pairs: of the chosen side
      --steps A:B       only rollouts that steps A to B trained; A: and :B leave one end open
      --inexact         also rows that the chat template writes otherwise than they were sampled
      --model-path FOLDER  where the tokenizer and the chat template are, if the run's model has moved
      --overwrite       replace the file if it exists
    Takes training rollouts that finished, whole or not at all. Each row is read back and its tokens
    are compared with those that were sampled; what was left out is counted by its reason. Needs no
    engine and no trainer, and only reads, so the run may still be running."""
    folder = read_run_folder(arguments)
    options = read_export_options(arguments[1:])
    report = export_data(folder, options, lambda text: print(text, file=sys.stderr))
    print(for_stdout(describe_export(report, options)))


def read_export_options(arguments: Sequence[str]) -> ExportOptions:
    """Return the flags after RUN_FOLDER as options. Raises ConfigError for a flag that
    is unknown, missing or wrong."""
    values, switches = split_options(arguments, _VALUES)
    for argument in switches:
        if argument not in _SWITCHES:
            raise unknown_flag(argument, [*_VALUES, *_SWITCHES])
    if "--out" not in values:
        raise ConfigError(
            "--out", "", "it is missing", "say which file to write: --out FILE.jsonl"
        )
    min_reward = None
    if "--min-reward" in values:
        min_reward = _read_reward("--min-reward", values["--min-reward"])
    label_from = None
    best = "1"
    if "--labels" in values:
        label_from = _read_reward("--labels", values["--labels"])
        best = "0"
        if "--pairs" in switches:
            reason = "a row is a pair or a conversation with a label"
            raise ConfigError(
                "--labels", values["--labels"], reason, "leave out --labels or --pairs"
            )
    steps = None
    if "--steps" in values:
        steps = _read_steps(values["--steps"])
    return ExportOptions(
        out=Path(values["--out"]).expanduser().absolute(),
        pairs="--pairs" in switches,
        label_from=label_from,
        best=_read_best(values.get("--best", best)),
        wanted=Wanted(min_reward=min_reward, steps=steps),
        inexact="--inexact" in switches,
        overwrite="--overwrite" in switches,
        model_path=values.get("--model-path", ""),
    )


def _read_best(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError("--best", text, "not a number", "give --best K; 0: all")
    return int(text)


def _read_reward(flag: str, text: str) -> float:
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise ConfigError(flag, text, "not a reward", "give a finite number")
    return reward


def _read_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step, both included. One number is one step."""
    first, colon, last = text.partition(":")
    if not colon:
        last = first
    ends = (first or "1", last or str(sys.maxsize))
    if text == ":" or not all(end.isdecimal() for end in ends):
        raise ConfigError(
            "--steps", text, "not a range of steps", "give A:B, A:, :B or one step"
        )
    begin, end = int(ends[0]), int(ends[1])
    if begin > end:
        raise ConfigError(
            "--steps", text, "it ends before it begins", "give the earlier step first"
        )
    return begin, end


def describe_export(report: ExportReport, options: ExportOptions) -> str:
    """Describe what was written, how faithful it is, and what was left out."""
    noun = "pair" if options.pairs else "conversation"
    mean = fmean(report.rewards)
    of = "chosen rewards" if options.pairs else "rewards"
    lines = [
        f"wrote {options.out}: {_count(report.rows, noun)} of {_count(report.rollouts, 'rollout')} "
        f"of {_count(report.tasks, 'task')}, {of} {min(report.rewards):.3g} to {max(report.rewards):.3g}, "
        f"mean {mean:.3f}"
    ]
    if options.label_from is not None:
        lines.append(f"  {report.labels[True]:>8}  with the label true")
        lines.append(f"  {report.labels[False]:>8}  with the label false")
    for fidelity, count in report.fidelities.most_common():
        lines.append(f"  {count:>8}  {fidelity}")
    if report.left_out:
        lines.append(f"left out: {_count(report.left_out.total(), 'rollout')}")
        for reason, count in report.left_out.most_common():
            lines.append(f"  {count:>8}  {reason}")
    for refusal, count in report.refusals.most_common(_MAX_REFUSALS):
        lines.append(f"refused, {count} times: {refusal}")
    objective = "sft"
    if options.pairs:
        objective = "dpo"
    elif options.label_from is not None:
        objective = "kto"
    lines.append(
        f"next: invrl train --objective {objective} --data-path {options.out} --model-path MODEL"
    )
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    """Return "1 pair" or "2 pairs", for example."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"
