"""The tasks that groups are leased for, in the order of the task source, and why there are no more."""

from collections.abc import Iterator

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
