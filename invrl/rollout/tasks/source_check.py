"""Checks a task source that records outcomes or keeps its state (`OutcomeRecorder`,
`StateKeeper` in `interfaces.py`), before any process starts."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from invrl.errors import PluginError
from invrl.interfaces import OutcomeRecorder, StateKeeper
from invrl.types.groups import GroupOutcome
from invrl.types.task_ids import USABLE_ID_FIX, is_usable_id
from invrl.types.task_state import TaskStateError, stored_state
from invrl.types.tasks import Json, Task
from invrl.types.weights import WeightVersion
from invrl.user_code.frame import USER_FRAME_PREFIX, describe_exception, raised_at

MADE_UP_GROUP = "g-check"
"""Group id of the outcome with which `record` is tried."""
_END = object()
_METHODS = {
    "record": "record(self, outcome)",
    "state": "state(self)",
    "restore": "restore(self, state)",
}


def has_feedback(tasks: object) -> bool:
    """Whether the tasks of a source record outcomes or keep their state. An attribute
    `state` alone makes neither: other iterators have that too."""
    return isinstance(tasks, OutcomeRecorder | StateKeeper)


def check_feedback(path: str, make_tasks: Callable[[], object]) -> None:
    """Try the methods on two new objects of the source: one task, one made-up outcome
    of it, the state, and whether a restored object continues like the first one.
    `make_tasks` makes such an object. Raises PluginError for the setting
    `task_source_path` with the value `path`."""
    _Check(path).run(make_tasks)


class _Check:
    def __init__(self, path: str) -> None:
        self._path = path

    def run(self, make_tasks: Callable[[], object]) -> None:
        tasks = make_tasks()
        self._check_methods(tasks)
        first_task = self._next(tasks)
        if first_task is None:
            raise self._error(
                "the split 'train' has no tasks", "let it yield at least one"
            )
        if isinstance(tasks, OutcomeRecorder):
            self._try_record(tasks, first_task)
        if isinstance(tasks, StateKeeper):
            self._try_state(tasks, make_tasks())

    def _check_methods(self, tasks: object) -> None:
        """Check that the methods exist, in pairs, and take their arguments."""
        # in addition to record(), one without the other is a mistake
        has_state = hasattr(tasks, "state")
        if has_state != hasattr(tasks, "restore"):
            missing = "restore" if has_state else "state"
            present = "state" if has_state else "restore"
            fix = f"write {_METHODS[missing]} too, or leave both out"
            raise self._error(
                f"what it returns has {present}() and no {missing}()", fix
            )
        if not isinstance(tasks, Iterator):
            reason = f"what it returns, a {type(tasks).__name__}, is told outcomes and has no __next__"
            raise self._error(
                reason, "write __next__(self) -> Task, and __iter__ that returns self"
            )
        for name, call in _METHODS.items():
            if not hasattr(tasks, name):
                continue
            method = getattr(tasks, name)
            if not callable(method):
                raise self._error(
                    f"its {name} is a {type(method).__name__}, not a method",
                    f"write {call}",
                )
            if inspect.iscoroutinefunction(method):
                raise self._error(
                    f"its {name}() is async, and nothing awaits it",
                    f"write it as def {call}",
                )
            arguments = [] if name == "state" else [None]
            try:
                inspect.signature(method).bind(*arguments)
            except TypeError as error:
                signature = inspect.signature(method)
                reason = f"its {name}{signature} does not take the call it will get ({error})"
                raise self._error(reason, f"write it as {call}") from None

    def _next(self, tasks: Iterator[Any] | object) -> Task | None:
        """Return the next task; None at the end."""
        assert isinstance(tasks, Iterator)
        with self._trying("__next__()"):
            task = next(tasks, _END)
        if task is _END:
            return None
        fix = "let it yield invrl.types.Task objects"
        if not isinstance(task, Task):
            raise self._error(f"it yielded a {type(task).__name__}, not a Task", fix)
        if not is_usable_id(task.id):
            raise self._error(f"it yielded the task id {task.id!r}", USABLE_ID_FIX)
        return task

    def _try_record(self, tasks: OutcomeRecorder, task: Task) -> None:
        outcome = GroupOutcome(
            task_id=task.id,
            group_id=MADE_UP_GROUP,
            version=WeightVersion(0),
            rewards_G=(0.0, 1.0),
            num_solved=1,
            complete=True,
        )
        with self._trying(f"record() of the made-up outcome {outcome}"):
            tasks.record(outcome)

    def _try_state(self, tasks: StateKeeper, restored: object) -> None:
        state = self._state(tasks)
        assert isinstance(restored, StateKeeper)
        with self._trying("restore() of what its state() returned"):
            restored.restore(state)
        expected = self._next(tasks)
        found = self._next(restored)
        expected_id = None if expected is None else expected.id
        found_id = None if found is None else found.id
        if expected_id != found_id:
            reason = (
                f"after restore(state()) a new object yields {_shown_id(found_id)} where the first one "
                f"yields {_shown_id(expected_id)}"
            )
            fix = "let state() return everything that decides what comes next, a random state included"
            raise self._error(reason, fix)

    def _state(self, tasks: StateKeeper) -> Json:
        with self._trying("state()"):
            state = tasks.state()
        try:
            return stored_state(state)
        except TaskStateError as error:
            fix = "return JSON: None, numbers, strings, lists, and dicts whose keys are strings"
            raise self._error(
                f"what its state() returns cannot be stored: {error}", fix
            ) from error

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Raise PluginError for an error of the source within the block."""
        try:
            yield
        except (Exception, SystemExit) as error:
            shown = describe_exception(error)
            line = raised_at(error)
            if line:
                shown += f" ({USER_FRAME_PREFIX}{line})"
            raise self._error(f"its {what} raised {shown}", "correct it") from error

    def _error(self, reason: str, fix: str) -> PluginError:
        return PluginError("task_source_path", self._path, reason, fix)


def _shown_id(task_id: str | None) -> str:
    if task_id is None:
        return "no task"
    return f"task {task_id!r}"
