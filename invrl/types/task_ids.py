"""Ids of tasks: which are valid, and how repeated tasks of a run are told apart."""

from collections import Counter
from collections.abc import Mapping

USABLE_ID_FIX = "give each task an id of 1 to 256 characters, in Unicode"


def is_usable_id(name: object) -> bool:
    """Whether this is a short string without lone surrogates. Ids are sent as JSON and
    are part of paths."""
    if not isinstance(name, str):
        return False
    return 0 < len(name) <= 256 and name.encode(errors="replace").decode() == name


class DistinctIds:
    """Makes the ids of one sequence of tasks distinct: the n-th repeat of "id" is
    "id@n"."""

    def __init__(self, occurrences: Mapping[str, int] | None = None) -> None:
        """`occurrences` are those of a sequence that is continued."""
        self._occurrences = Counter(occurrences or {})

    def distinct(self, task_id: str) -> str:
        """Return the distinct id of the next task with this id."""
        num_before = self._occurrences[task_id]
        self._occurrences[task_id] += 1
        if num_before:
            return f"{task_id}@{num_before}"
        return task_id

    @property
    def occurrences(self) -> Mapping[str, int]:
        """Number of times that each id has occurred so far."""
        return dict(self._occurrences)
