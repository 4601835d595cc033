"""Tasks of new groups, in the order of the task source, and the reason that there are
no more.

A plain source yields the same tasks for the same seed, so a resume reads it again up to
where it was. A source that records outcomes (`OutcomeRecorder`) or keeps its state
(`StateKeeper`) is not read again: the snapshot holds its state and the tasks of the
open groups. Errors in the source are errors of data, not of the run: they are shown,
and the run continues as long as tasks come.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from invrl.buffer.failures import RECORD_FAILED, STATE_LOST
from invrl.buffer.ledger.open_group import OpenGroup
from invrl.errors import BufferStateError, UnsendableTaskError
from invrl.interfaces import OutcomeRecorder, StateKeeper
from invrl.store.lease_store import encoded_task
from invrl.types.groups import GroupOutcome
from invrl.types.task_ids import USABLE_ID_FIX, DistinctIds, is_usable_id
from invrl.types.task_state import TaskStateError, stored_state
from invrl.types.tasks import Task
from invrl.user_code.frame import USER_FRAME_PREFIX, describe_exception, raised_at


@dataclass(frozen=True, slots=True, kw_only=True)
class FedTask:
    """A task for a new group."""

    task: Task
    """Task with an id that no other task of the run has."""
    source_id: str
    """Id from the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSnapshot:
    """Position of a source that a resume cannot read again."""

    tasks: Mapping[str, Mapping[str, Any]]
    """Tasks of the open groups, by group id: the fields of `Task`."""
    occurrences: Mapping[str, int]
    """Number of times that the source has yielded each id."""
    state: Any = None
    """Return value of its `state()`."""
    no_state: str = ""
    """Reason that there is no state."""


class TaskFeed:
    """Reads the task source, which is user code: if it raises or yields anything but a
    task, it has ended.

    `note_fault` is called with the key and the text of errors in `record` and `state`.
    """

    def __init__(
        self,
        source: Iterator[Task],
        note_fault: Callable[[str, str], None] = lambda key, text: None,
    ) -> None:
        self._source = source
        self._recorder = source if isinstance(source, OutcomeRecorder) else None
        self._keeper = source if isinstance(source, StateKeeper) else None
        self._note_fault = note_fault
        self._ids = DistinctIds()
        self.end = ""
        """Reason that no more tasks come; "" while they do."""

    @property
    def is_read_again(self) -> bool:
        """Whether a resume reads the source again, instead of restoring it."""
        return self._recorder is None and self._keeper is None

    def next(self) -> FedTask | None:
        """Return the next task, or None once the source has ended."""
        if self.end:
            return None
        try:
            task = next(self._source)
        except StopIteration:
            self.end = "the task source has ended"
            return None
        except Exception as error:
            self.end = f"the task source raised {_shown(error)}"
            return None
        self.end = self._fault(task)
        if self.end:
            return None
        return FedTask(
            task=replace(task, id=self._ids.distinct(task.id)), source_id=task.id
        )

    def _fault(self, task: object) -> str:
        """Describe why the run cannot continue with the yielded object; "" if it
        can."""
        if not isinstance(task, Task):
            return (
                f"the task source yielded {type(task).__name__}, not invrl.types.Task"
            )
        if not is_usable_id(task.id):
            return f"the task source yielded the task id {task.id!r}: {USABLE_ID_FIX}"
        if self.is_read_again:
            return ""
        try:
            encoded_task(task)
        except UnsendableTaskError as error:
            return (
                f"{error}; a source with record() or state() needs tasks of JSON's types, because its "
                "checkpoints hold them"
            )
        return ""

    def record(self, outcome: GroupOutcome) -> None:
        """Report to the source how a group ended, if it records outcomes."""
        if self._recorder is None:
            return
        try:
            self._recorder.record(outcome)
        except (Exception, SystemExit) as error:
            self._note_fault(RECORD_FAILED, _shown_below(error))

    # ----------------------------------------------------------------- incarnations

    def snapshot(self, tasks: Mapping[str, Task]) -> FeedSnapshot | None:
        """Return the source's position; None if a resume reads it again. `tasks` are
        those of the open groups, by group id. A failing `state()` loses the state, not
        the checkpoint."""
        if self.is_read_again:
            return None
        state = None
        no_state = ""
        if self._keeper is None:
            no_state = "it has no state() and restore()"
        else:
            try:
                state = stored_state(self._keeper.state())
            except TaskStateError as error:
                no_state = f"its state() cannot be stored: {error}"
                self._note_fault(STATE_LOST, no_state)
            except (Exception, SystemExit) as error:
                no_state = f"its state() raised {_shown(error)}"
                self._note_fault(STATE_LOST, _shown_below(error))
        return FeedSnapshot(
            tasks={
                group_id: msgspec.json.decode(encoded_task(task))
                for group_id, task in tasks.items()
            },
            occurrences=self._ids.occurrences,
            state=state,
            no_state=no_state,
        )

    def restore(
        self,
        snapshot: FeedSnapshot | None,
        num_groups: int,
        groups: Iterable[OpenGroup],
    ) -> dict[str, Task]:
        """Move the new source to the snapshot's position, after `num_groups` tasks, and
        return the tasks of `groups` by group id. Raises BufferStateError if the source
        yields other tasks or refuses its state."""
        if snapshot is None:
            if not self.is_read_again and num_groups:
                raise BufferStateError(
                    "the task source has record() or state(), and the one that the run began with had "
                    "neither: a run resumes only on the task source that it began with"
                )
            return self._read_again(num_groups, groups)
        if self.is_read_again:
            raise BufferStateError(
                "the task source has no record() and no state(), and the one that the run began with had: "
                "a run resumes only on the task source that it began with"
            )
        tasks = {
            group_id: Task(**stored) for group_id, stored in snapshot.tasks.items()
        }
        missing = [group.id for group in groups if group.id not in tasks]
        if missing:
            raise BufferStateError(f"the checkpoint has no task for group {missing[0]}")
        self._ids = DistinctIds(snapshot.occurrences)
        self._restore_state(snapshot)
        return tasks

    def _restore_state(self, snapshot: FeedSnapshot) -> None:
        if snapshot.no_state:
            self._note_fault(
                STATE_LOST,
                "the checkpoint has no state of the task source, which begins anew and knows no outcome: "
                f"{snapshot.no_state}",
            )
            return
        if self._keeper is None:
            raise BufferStateError(
                "the checkpoint holds the state of the task source, and the source has no restore(state) "
                "any more: resume with the source that the run began with"
            )
        try:
            self._keeper.restore(snapshot.state)
        except (Exception, SystemExit) as error:
            raise BufferStateError(
                f"the task source does not take its state back: restore() raised {_shown(error)}. "
                "Correct it, or resume with the source that the run began with"
            ) from error

    def _read_again(
        self, num_groups: int, groups: Iterable[OpenGroup]
    ) -> dict[str, Task]:
        """Read one task for each of the `num_groups` groups leased so far, and return
        those of `groups` by group id. Raises BufferStateError if they had other
        tasks."""
        groups_by_number = {group.number: group for group in groups}
        tasks: dict[str, Task] = {}
        for number in range(num_groups):
            fed = self.next()
            if fed is None:
                raise BufferStateError(f"group g{number} had a task, but {self.end}")
            group = groups_by_number.get(number)
            if group is None:
                continue
            if fed.task.id != group.task_id:
                raise BufferStateError(
                    f"group {group.id} had task {group.task_id}, the task source now gives {fed.task.id}: "
                    "a run resumes only on the tasks that it began with"
                )
            tasks[group.id] = fed.task
        return tasks


def _shown(error: BaseException) -> str:
    """Return the exception and its line of user code, in one line."""
    line = raised_at(error)
    if not line:
        return describe_exception(error)
    return f"{describe_exception(error)} ({USER_FRAME_PREFIX}{line})"


def _shown_below(error: BaseException) -> str:
    """Return the same in two lines, as the console shows failures."""
    line = raised_at(error)
    if not line:
        return describe_exception(error)
    return f"{describe_exception(error)}\n{USER_FRAME_PREFIX}{line}"
