"""Held-out tasks that are also training tasks, on which an accuracy is training
accuracy. Pure.

Two tasks are the same if their payloads agree in every field that distinguishes tasks,
whatever their ids. The same id makes them the same only where ids are names: counters
restart in every file.
"""

import json
import re
from collections.abc import Sequence

from invrl.types.tasks import Task

_COUNTER = re.compile(r"\D*\d+")
"""An id that counts: "7", "q7", "test-007"."""


def shared_tasks(
    training: Sequence[Task], held_out: Sequence[Task], *, id_key: str
) -> list[Task]:
    """Return the tasks of `held_out` that occur in `training`. `id_key` is the id's
    field of a payload."""
    if not training:
        return []
    fields = _telling_fields(training, held_out, id_key)
    contents = {_content(task, fields) for task in training}
    names = {task.id for task in training if not _COUNTER.fullmatch(task.id)}
    return [
        task
        for task in held_out
        if _content(task, fields) in contents or task.id in names
    ]


def _telling_fields(
    training: Sequence[Task], held_out: Sequence[Task], id_key: str
) -> list[str]:
    """Return the fields that every payload has and that vary within the tasks of a
    split: a field that names the split, or the data set, does not. If none varies, all
    that every payload has."""
    common = _common_fields([*training, *held_out]) - {id_key}
    varying = [
        field
        for field in common
        if any(
            len({_json(task.payload[field]) for task in tasks}) > 1
            for tasks in (training, held_out)
        )
    ]
    return sorted(varying or common)


def _common_fields(tasks: Sequence[Task]) -> set[str]:
    fields = [set(task.payload) for task in tasks]
    return fields[0].intersection(*fields)


def _content(task: Task, fields: Sequence[str]) -> str:
    if not fields:
        return _json([task.payload, task.label])
    return _json([task.payload[field] for field in fields])


def _json(value: object) -> str:
    """Return the value as text; equal for equal values."""
    return json.dumps(value, sort_keys=True, default=repr)
