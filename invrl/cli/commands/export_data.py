"""`invrl export-data`: writes rollouts of a run as a file that `invrl train
--data-path` reads. Which rows these are is decided in `run/exports/exported_rows.py`.

The run may be live: its store is only read. The file appears whole."""

import contextlib
import json
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from invrl.cli.arguments import (
    read_number,
    read_options,
    read_run_folder,
    read_whole,
)
from invrl.datasets.recorded_rows import Fidelity
from invrl.errors import ConfigError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.host.output.printable import printable
from invrl.observe.samples.best_samples import (
    Wanted,
    candidates_for_pairs,
    candidates_for_rows,
)
from invrl.observe.samples.samples import read_samples
from invrl.observe.samples.samples_text import count_text
from invrl.run.checkpoints.store_check import check_store
from invrl.run.exports.exported_rows import ExportedRows, ExportOptions, ExportReport
from invrl.run.settings.config import Config
from invrl.run.settings.resolved_config import load_resolved
from invrl.run.settings.run_config import ModelConfig
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types.tasks import Json
from invrl.user_code.model_folder import check_is_folder

_VALUES = ("--out", "--best", "--labels", "--min-reward", "--steps", "--model-path")
_SWITCHES = ("--pairs", "--inexact", "--overwrite")
_MAX_REFUSALS = 3
"""Different refusals that are shown."""
_NO_LIMIT = 2**31
"""Vocabulary size that refuses no token id."""


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
    print(printable(describe_export(report, options)))


def read_export_options(arguments: Sequence[str]) -> ExportOptions:
    """Return the flags after RUN_FOLDER as options. Raises ConfigError for a flag that
    is unknown, missing or wrong."""
    values = read_options(arguments, _VALUES, _SWITCHES)
    if "--out" not in values:
        raise ConfigError(
            "--out", "", "it is missing", "say which file to write: --out FILE.jsonl"
        )
    label_from = _read_reward(values, "--labels")
    best = "1" if label_from is None else "0"
    if label_from is not None and "--pairs" in values:
        reason = "a row is a pair or a conversation with a label"
        raise ConfigError(
            "--labels", values["--labels"], reason, "leave out --labels or --pairs"
        )
    steps = None
    if "--steps" in values:
        steps = _read_steps(values["--steps"])
    return ExportOptions(
        out=Path(values["--out"]).expanduser().absolute(),
        pairs="--pairs" in values,
        label_from=label_from,
        best=read_whole(
            "--best",
            values.get("--best", best),
            reason="not a number",
            fix="give --best K; 0: all",
        ),
        wanted=Wanted(min_reward=_read_reward(values, "--min-reward"), steps=steps),
        inexact="--inexact" in values,
        overwrite="--overwrite" in values,
        model_path=values.get("--model-path", ""),
    )


def _read_reward(values: Mapping[str, str], flag: str) -> float | None:
    if flag not in values:
        return None
    fix = "give a finite number"
    text = values[flag]
    return read_number(flag, text, reason="not a reward", fix=fix, least=-math.inf)


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


def export_data(
    folder: RunFolder, options: ExportOptions, note: Callable[[str], None]
) -> ExportReport:
    """Write `options.out`. `note` receives the progress every ten seconds. Raises
    ConfigError if there is nothing to write, or for a file that exists;
    DamagedFileError for an unreadable store."""
    _check_target(options)
    check_store(folder.store_path)
    config = load_resolved(folder.config_path)
    samples = read_samples(folder.store_path, config.buffer.failures.rules())
    if options.pairs:
        candidates = candidates_for_pairs(samples, options.wanted)
    else:
        candidates = candidates_for_rows(samples, options.wanted)
    if not candidates.by_task:
        raise _nothing(candidates.left_out, ExportReport())
    with contextlib.closing(RunStore(folder.store_path)) as store:
        export = ExportedRows(options, store, _load_renderer(config, options), note)
        report = export.report
        partial = options.out.with_name(f"{options.out.name}.partial")
        _write(options.out, partial, export.rows(candidates))
    report.left_out.update(candidates.left_out)
    if not report.rows:
        partial.unlink()
        raise _nothing(report.left_out, report)
    os.replace(partial, options.out)
    return report


def _check_target(options: ExportOptions) -> None:
    out = options.out
    faults = (
        (
            out.suffix.lower() == ".parquet",
            "JSONL is written, not Parquet",
            "let its name end in .jsonl",
        ),
        (out.is_dir(), "it is a folder", "give the name of a file in it"),
        (
            not out.parent.is_dir(),
            "its folder does not exist",
            "make the folder, or give another",
        ),
        (
            out.exists() and not options.overwrite,
            "it exists",
            "give another name, or add --overwrite",
        ),
    )
    for is_wrong, reason, fix in faults:
        if is_wrong:
            raise ConfigError("--out", str(out), reason, fix)


def _nothing(left_out: Counter[str], report: ExportReport) -> ConfigError:
    """Return the error for an export without a row."""
    if not left_out:
        reason = "no rollout of this run has ended yet"
        return ConfigError(
            "RUN", "", reason, "wait for the first one, or look at the run's log"
        )
    reasons = "; ".join(
        f"{count} rollouts: {reason}" for reason, count in left_out.most_common()
    )
    fix = "ask for less with --min-reward or --steps, or see the rollouts with `invrl samples RUN --step all`"
    if Fidelity.OTHER_TEXT in left_out:
        fix = f"--inexact writes rows that the template writes otherwise too; or {fix}"
    if report.refusals:
        reasons += f" (refused: {report.refusals.most_common(1)[0][0]})"
    return ConfigError("RUN", "", f"there is nothing to write: {reasons}", fix)


def _load_renderer(config: Config, options: ExportOptions) -> Renderer:
    """Load the renderer of the run's model and template, which rendered its recorded
    turns. Raises ConfigError."""
    model_path = options.model_path or config.model.model_path
    folder = ModelConfig(model_path=model_path).folder
    if options.model_path:
        check_is_folder("--model-path", options.model_path, folder)
    elif not folder.is_dir():
        fix = "give a folder with its tokenizer and chat template: --model-path FOLDER"
        raise ConfigError(
            "model.model_path", model_path, "the run's model is not there any more", fix
        )
    return load_renderer(
        str(folder),
        _NO_LIMIT,
        chat_template=config.gateway.chat_template_path,
        keep_thinking=config.gateway.keep_thinking,
        special_tokens_in_content=config.gateway.special_tokens_in_content,
    )


def _write(out: Path, partial: Path, rows: Iterator[dict[str, Json]]) -> None:
    """Write the partial file of `out`, which is removed unless it is completed."""
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                # ASCII: half of a surrogate pair, which JSON can escape, is no UTF-8.
                file.write(json.dumps(row) + "\n")
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            "--out", str(out), f"it cannot be written: {error}", "give another one"
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def describe_export(report: ExportReport, options: ExportOptions) -> str:
    """Describe what was written, how faithful it is, and what was left out."""
    noun = "pair" if options.pairs else "conversation"
    mean = fmean(report.rewards)
    of = "chosen rewards" if options.pairs else "rewards"
    lines = [
        f"wrote {options.out}: {count_text(report.rows, noun)} of {count_text(report.rollouts, 'rollout')} "
        f"of {count_text(report.tasks, 'task')}, {of} {min(report.rewards):.3g} to {max(report.rewards):.3g}, "
        f"mean {mean:.3f}"
    ]
    if options.label_from is not None:
        lines.append(f"  {report.labels[True]:>8}  with the label true")
        lines.append(f"  {report.labels[False]:>8}  with the label false")
    for fidelity, count in report.fidelities.most_common():
        lines.append(f"  {count:>8}  {fidelity}")
    if report.left_out:
        lines.append(f"left out: {count_text(report.left_out.total(), 'rollout')}")
        for reason, count in report.left_out.most_common():
            lines.append(f"  {count:>8}  {reason}")
    for refusal, count in report.refusals.most_common(_MAX_REFUSALS):
        lines.append(f"refused, {count} times: {refusal}")
    objective = "sft"
    if options.pairs:
        objective = "dpo"
    elif options.label_from is not None:
        objective = "kto"
    data_path = shlex.quote(str(options.out))
    lines.append(
        f"next: invrl train --objective {objective} --data-path {data_path} --model-path MODEL"
    )
    return "\n".join(lines)
