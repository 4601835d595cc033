"""Rollouts of a run as rows of a data file: the best ones as conversations, all of them
with a label, or pairs of a better and a worse one.

A rollout becomes rows whole or is left out, and every rollout that has ended is counted
once, as written or with the reason why it was left out."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from invrl.datasets.recorded_rows import (
    TRUE,
    Fidelity,
    RecordedTrajectory,
    RestoredRow,
    fits_pair,
    pair_fields,
    restore,
)
from invrl.gateway.rendering.renderer import Renderer
from invrl.observe.samples.best_samples import (
    Candidates,
    Wanted,
    finished_reward,
    worst_first,
)
from invrl.observe.samples.samples import Sample
from invrl.run.exports.recorded_trajectories import recorded_trajectories
from invrl.store.run_store import RunStore
from invrl.types.tasks import Json

_NOT_AMONG_BEST = "not among the best of its task"
_SAME_TOKENS = "the same tokens as another rollout of its task"
_NOTHING_TRAINED = "nothing of it may be trained"
_BETWEEN = "neither the best nor the worst of its group"
_NO_OTHER_SIDE = "no rollout of its group can be the other side of a pair"
_OTHER_PROMPT = "it answers another prompt than the chosen rollout of its group"
_SEVERAL_ROWS = "it has several trajectories, or replies that are not trained, and a pair has neither"
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


@dataclass(frozen=True, slots=True)
class ExportedRows:
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
        of_task = self._task_pairs if self.options.pairs else self._task_conversations
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

    def _task_conversations(
        self, lists: Sequence[Sequence[Sample]]
    ) -> Iterator[dict[str, Json]]:
        """`lists`: one rollout each."""
        written: set[tuple[bytes, ...]] = set()
        for (sample,) in lists:
            if self._is_enough(len(written)):
                self.report.left_out[_NOT_AMONG_BEST] += 1
                continue
            trajectories = recorded_trajectories(self.store, sample.identity.session_id)
            tokens = tuple(trajectory.tokens_T.tobytes() for trajectory in trajectories)
            if tokens in written:
                self.report.left_out[_SAME_TOKENS] += 1
                continue
            rows = self._restore(trajectories)
            if not rows:
                continue
            written.add(tokens)
            self.report.rollouts += 1
            self.report.rewards.append(finished_reward(sample))
            for row in rows:
                self.report.rows += 1
                self.report.fidelities[row.fidelity] += 1
                yield {
                    **row.fields,
                    **self._label(sample),
                    **_origin(sample),
                    "reward": finished_reward(sample),
                }

    def _label(self, sample: Sample) -> dict[str, Json]:
        if self.options.label_from is None:
            return {}
        is_good = finished_reward(sample) >= self.options.label_from
        self.report.labels[is_good] += 1
        return {"label": is_good}

    def _restore(self, trajectories: Sequence[RecordedTrajectory]) -> list[RestoredRow]:
        """Return the rows of a rollout. If one of them cannot be written, return none,
        and count the rollout as left out."""
        if not trajectories:
            self.report.left_out[_NOTHING_TRAINED] += 1
        rows: list[RestoredRow] = []
        for trajectory in trajectories:
            row = restore(self.renderer, trajectory)
            if row.fidelity not in TRUE and not (
                self.options.inexact and row.fidelity is Fidelity.OTHER_TEXT
            ):
                self.report.left_out[row.fidelity] += 1
                if row.detail:
                    self.report.refusals[row.detail] += 1
                return []
            rows.append(row)
        return rows

    # ------------------------------------------------------------- pairs

    def _task_pairs(
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
        lowest = finished_reward(group[-1])
        for sample in group:
            if finished_reward(sample) == lowest or self._is_too_low(sample):
                break
            unused.remove(sample.identity.session_id)
            chosen = self._side(sample)
            if chosen is None:
                continue
            pair = self._pair_with(sample, chosen, group, unused)
            if pair is not None:
                self.report.left_out[_BETWEEN] += len(unused)
                return pair
            # The rollouts of a group have one prompt as a rule, so no other one is
            # tried as its chosen side.
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
            if finished_reward(sample) >= finished_reward(best):
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
            self.report.rewards.append(finished_reward(best))
            self.report.fidelities.update([chosen.fidelity, rejected.fidelity])
            return {
                **fields,
                **_origin(best),
                "rejected_rollout_id": sample.identity.session_id,
                "reward": finished_reward(best),
                "rejected_reward": finished_reward(sample),
            }
        return None

    def _is_too_low(self, sample: Sample) -> bool:
        min_reward = self.options.wanted.min_reward
        return min_reward is not None and finished_reward(sample) < min_reward

    def _side(self, sample: Sample) -> RestoredRow | None:
        """Return the only row of a rollout, as a side of a pair. If it cannot be one,
        count it and return None."""
        rows = self._restore(
            recorded_trajectories(self.store, sample.identity.session_id)
        )
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
