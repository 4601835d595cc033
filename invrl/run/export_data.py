"""Writes rollouts of a run as a data file: the best ones as conversations, all of them
with a label, or pairs of a better and a worse one.

The run may be live: its store is only read. A rollout is written completely or left
out, and every ended rollout is counted once, as written or with the reason that it was
left out. The file appears complete.
"""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from invrl.datasets.recorded_rows import (
    INEXACT,
    TRUE,
    Fidelity,
    RecordedBranch,
    RestoredRow,
    fits_pair,
    pair_fields,
    restore,
)
from invrl.errors import ConfigError
from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.rendering.renderer import Renderer
from invrl.observe.best_samples import (
    Candidates,
    Wanted,
    candidates_for_pairs,
    candidates_for_rows,
    reward_of,
    worst_first,
)
from invrl.observe.samples import Sample, read_samples
from invrl.run.config import Config, ModelConfig
from invrl.run.recorded_branches import recorded_branches
from invrl.run.resolved_config import load_resolved
from invrl.run.store_check import check_store
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.types import Json
from invrl.user_code.model_folder import check_is_folder

_NOT_AMONG_BEST = "not among the best of its task"
_SAME_TOKENS = "the same tokens as another rollout of its task"
_NOTHING_TRAINED = "nothing of it may be trained"
_BETWEEN = "neither the best nor the worst of its group"
_NO_OTHER_SIDE = "no rollout of its group can be the other side of a pair"
_OTHER_PROMPT = "it answers another prompt than the chosen rollout of its group"
_SEVERAL_ROWS = (
    "it has several branches, or replies that are not trained, and a pair has neither"
)
_NO_LIMIT = 2**31
"""Vocabulary size that refuses no token id."""
_PROGRESS_S = 10.0
"""Seconds between two reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export: its content and its file."""

    out: Path
    pairs: bool = False
    label_from: float | None = None
    """Lowest reward for which a conversation has the label true. None: no labels."""
    best: int = 1
    """Most rollouts or pairs of a task, each of another group; 0: all."""
    wanted: Wanted = field(default_factory=Wanted)
    inexact: bool = False
    """Whether to write samples that the template renders differently than they were
    sampled."""
    overwrite: bool = False
    model_path: str = ""
    """Folder whose tokenizer and template restore the texts; "": the run's model."""


@dataclass(slots=True, kw_only=True)
class ExportReport:
    """Counts of the rollouts that were written and left out."""

    rows: int = 0
    rollouts: int = 0
    tasks: int = 0
    rewards: list[float] = field(default_factory=list)
    """Rewards of the conversations, or of the chosen sides."""
    labels: Counter[bool] = field(default_factory=Counter)
    """Labels of the conversations, if they have them."""
    fidelities: Counter[Fidelity] = field(default_factory=Counter)
    """Fidelities of the conversations, or of both sides of the pairs."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rollouts that were left out, by reason."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Reasons for which conversations were refused (`Fidelity.REFUSED`)."""


def export_data(
    folder: RunFolder, options: ExportOptions, note: Callable[[str], None]
) -> ExportReport:
    """Write `options.out`. `note` receives the progress every ten seconds. Raises
    ConfigError if there is nothing to write, or for a file that exists;
    DamagedFileError for an unreadable store."""
    _check_target(options)
    check_store(folder.store_path)
    config = load_resolved(folder.config_path)
    samples = read_samples(folder.store_path, config.buffer.failure_rules())
    if options.pairs:
        candidates = candidates_for_pairs(samples, options.wanted)
    else:
        candidates = candidates_for_rows(samples, options.wanted)
    if not candidates.by_task:
        raise _nothing(candidates.left_out, ExportReport())
    with contextlib.closing(RunStore(folder.store_path)) as store:
        export = _Export(options, store, _load_renderer(config, options), note)
        _write(options.out, export.rows(candidates))
        report = export.report
    report.left_out.update(candidates.left_out)
    if not report.rows:
        options.out.with_name(f"{options.out.name}.partial").unlink()
        raise _nothing(report.left_out, report)
    os.replace(options.out.with_name(f"{options.out.name}.partial"), options.out)
    return report


def _check_target(options: ExportOptions) -> None:
    out = options.out
    if out.suffix.lower() == ".parquet":
        raise ConfigError(
            "--out",
            str(out),
            "JSONL is written, not Parquet",
            "let its name end in .jsonl",
        )
    if out.is_dir():
        raise ConfigError(
            "--out", str(out), "it is a folder", "give the name of a file in it"
        )
    if not out.parent.is_dir():
        raise ConfigError(
            "--out",
            str(out),
            "its folder does not exist",
            "make the folder, or give another",
        )
    if out.exists() and not options.overwrite:
        raise ConfigError(
            "--out", str(out), "it exists", "give another name, or add --overwrite"
        )


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
    if any(reason in left_out for reason in INEXACT):
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


def _write(out: Path, rows: Iterator[dict[str, Json]]) -> None:
    """Write into a partial file next to `out`, which is removed unless it is
    completed."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                # ASCII: half of a surrogate pair, which JSON can escape, is not UTF-8.
                file.write(json.dumps(row) + "\n")
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            "--out", str(out), f"it cannot be written: {error}", "give another one"
        ) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Export:
    """Rows of one file, and their counts."""

    options: ExportOptions
    store: RunStore
    renderer: Renderer
    note: Callable[[str], None]
    report: ExportReport = field(default_factory=ExportReport)

    def rows(self, candidates: Candidates) -> Iterator[dict[str, Json]]:
        """Yield rows task by task, in the order in which the tasks first appeared. The
        report is complete at the end."""
        last_note = time.monotonic()
        of_task = (
            self._pairs_of_task if self.options.pairs else self._conversations_of_task
        )
        for number, lists in enumerate(candidates.by_task.values()):
            if time.monotonic() - last_note > _PROGRESS_S:
                self.note(
                    f"{number:,} of {len(candidates.by_task):,} tasks, {self.report.rows:,} rows"
                )
                last_note = time.monotonic()
            num_rows = self.report.rows
            yield from of_task(lists)
            self.report.tasks += self.report.rows > num_rows

    def _is_enough(self, count: int) -> bool:
        """Whether `count` rollouts or pairs of one task suffice."""
        return bool(self.options.best) and count >= self.options.best

    # ------------------------------------------------------------- conversations

    def _conversations_of_task(
        self, lists: Sequence[Sequence[Sample]]
    ) -> Iterator[dict[str, Json]]:
        """`lists`: one rollout each."""
        written: set[tuple[bytes, ...]] = set()
        for (sample,) in lists:
            if self._is_enough(len(written)):
                self.report.left_out[_NOT_AMONG_BEST] += 1
                continue
            branches = recorded_branches(self.store, sample.identity.session_id)
            tokens = tuple(branch.tokens_T.tobytes() for branch in branches)
            if tokens in written:
                self.report.left_out[_SAME_TOKENS] += 1
                continue
            rows = self._restore(branches)
            if not rows:
                continue
            written.add(tokens)
            self.report.rollouts += 1
            self.report.rewards.append(reward_of(sample))
            for row in rows:
                self.report.rows += 1
                self.report.fidelities[row.fidelity] += 1
                yield {
                    **row.fields,
                    **self._label(sample),
                    **_origin(sample),
                    "reward": reward_of(sample),
                }

    def _label(self, sample: Sample) -> dict[str, Json]:
        if self.options.label_from is None:
            return {}
        is_good = reward_of(sample) >= self.options.label_from
        self.report.labels[is_good] += 1
        return {"label": is_good}

    def _restore(self, branches: Sequence[RecordedBranch]) -> list[RestoredRow]:
        """Return the rows of a rollout. If one of them cannot be written, return none,
        and count the rollout as left out."""
        if not branches:
            self.report.left_out[_NOTHING_TRAINED] += 1
        rows: list[RestoredRow] = []
        for branch in branches:
            row = restore(self.renderer, branch)
            if row.fidelity not in TRUE and not (
                self.options.inexact and row.fidelity in INEXACT
            ):
                self.report.left_out[row.fidelity] += 1
                if row.detail:
                    self.report.refusals[row.detail] += 1
                return []
            rows.append(row)
        return rows

    # ------------------------------------------------------------- pairs

    def _pairs_of_task(
        self, lists: Sequence[Sequence[Sample]]
    ) -> Iterator[dict[str, Json]]:
        """`lists`: groups, each with its best rollout first."""
        num_pairs = 0
        for group in lists:
            if self._is_enough(num_pairs):
                self.report.left_out[_NOT_AMONG_BEST] += len(group)
                continue
            pair = self._pair(group)
            if pair is not None:
                num_pairs += 1
                yield pair

    def _pair(self, group: Sequence[Sample]) -> dict[str, Json] | None:
        """Return the group's best rollout that can be written, and the worst one with
        the same prompt. Every rollout of the group is counted."""
        unused = {sample.identity.session_id for sample in group}
        lowest = reward_of(group[-1])
        for sample in group:
            if reward_of(sample) == lowest or self._is_too_low(sample):
                break
            unused.remove(sample.identity.session_id)
            chosen = self._side(sample)
            if chosen is None:
                continue
            pair = self._pair_with(sample, chosen, group, unused)
            if pair is not None:
                self.report.left_out[_BETWEEN] += len(unused)
                return pair
            # The rollouts of a group usually have one prompt, so no other is tried as
            # its chosen side.
            self.report.left_out[_NO_OTHER_SIDE] += 1
            break
        self.report.left_out[_NO_OTHER_SIDE] += len(unused)
        return None

    def _pair_with(
        self,
        best: Sample,
        chosen: RestoredRow,
        group: Sequence[Sample],
        unused: set[str],
    ) -> dict[str, Json] | None:
        """Return the fields of the pair; None if no rollout of the group can be its
        rejected side. Rollouts that are used or counted are removed from `unused`."""
        for sample in worst_first(group):
            if reward_of(sample) >= reward_of(best):
                return None
            unused.discard(sample.identity.session_id)
            rejected = self._side(sample)
            if rejected is None:
                continue
            fields = pair_fields(chosen, rejected)
            if fields is None:
                self.report.left_out[_OTHER_PROMPT] += 1
                continue
            self.report.rows += 1
            self.report.rollouts += 2
            self.report.rewards.append(reward_of(best))
            self.report.fidelities.update([chosen.fidelity, rejected.fidelity])
            return {
                **fields,
                **_origin(best),
                "rejected_rollout_id": sample.identity.session_id,
                "reward": reward_of(best),
                "rejected_reward": reward_of(sample),
            }
        return None

    def _is_too_low(self, sample: Sample) -> bool:
        min_reward = self.options.wanted.min_reward
        return min_reward is not None and reward_of(sample) < min_reward

    def _side(self, sample: Sample) -> RestoredRow | None:
        """Return the only row of a rollout, as a side of a pair. If it cannot be one,
        count it and return None."""
        rows = self._restore(recorded_branches(self.store, sample.identity.session_id))
        if not rows:
            return None
        if len(rows) > 1 or not fits_pair(rows[0]):
            self.report.left_out[_SEVERAL_ROWS] += 1
            return None
        return rows[0]


def _origin(sample: Sample) -> dict[str, Json]:
    """Return the fields of a row that tell its origin. Training ignores them."""
    identity = sample.identity
    return {
        "task_id": identity.task_id,
        "group_id": identity.group_id,
        "rollout_id": identity.session_id,
        "step": sample.step,
    }
