"""The tasks that groups are leased for, in the order of the task source, and why there are no more."""

from collections.abc import Iterable, Iterator

from invrl.buffer.open_group import OpenGroup
from invrl.errors import BufferStateError
from invrl.types import Task
from invrl.user_frame import USER_FRAME_PREFIX, describe_exception, raised_at


class TaskFeed:
    """Reads the task source, which is user code: if it raises or yields something else, it has ended."""

    def __init__(self, source: Iterator[Task]) -> None:
        self._source = source
        self.end = ""
        """Why no more tasks come; "" while they do."""

    def next(self) -> Task | None:
        """The next task, or None once the source has ended."""
        if self.end:
            return None
        try:
            task = next(self._source)
        except StopIteration:
            self.end = "the task source has ended"
            return None
        except Exception as error:
            self.end = f"the task source raised {describe_exception(error)}"
            line = raised_at(error)
            if line:
                self.end += f" ({USER_FRAME_PREFIX}{line})"
            return None
        if not isinstance(task, Task):
            self.end = f"the task source yielded {type(task).__name__}, not invrl.types.Task"
            return None
        return task

    def read_again(self, num_groups: int, groups: Iterable[OpenGroup]) -> dict[str, Task]:
        """Reads one task for each of the `num_groups` groups that the run has leased so far. Returns those of
        `groups`, by group id. Raises BufferStateError if they had other tasks."""
        groups_by_number = {group.number: group for group in groups}
        tasks: dict[str, Task] = {}
        for number in range(num_groups):
            task = self.next()
            if task is None:
                raise BufferStateError(f"group g{number} had a task, but {self.end}")
            group = groups_by_number.get(number)
            if group is None:
                continue
            if task.id != group.task_id:
                raise BufferStateError(
                    f"group {group.id} had task {group.task_id}, the task source now gives {task.id}: "
                    "a run resumes only on the tasks that it began with"
                )
            tasks[group.id] = task
        return tasks
