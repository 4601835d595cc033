"""Held-out tasks that are also training tasks, on which an accuracy is training
accuracy. Pure.

Two tasks are the same if their payloads agree in every field that distinguishes tasks,
whatever their ids. The fields of an object count one by one, and whitespace in a text
counts as one space. The same id makes two tasks the same only where ids are names:
counters restart in every file.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from invrl.types.tasks import Json, Task

_COUNTER = re.compile(r"\D*\d+")
"""An id that counts: "7", "q7", "test-007"."""
_ID_FIELD = re.compile(r"(.*[_.-])?(id|idx|index|uid|uuid)", re.IGNORECASE)
"""Name of a field that may number rows: "extra_info.index", "problem_id"."""


def shared_tasks(
    training: Sequence[Task], held_out: Sequence[Task], *, id_key: str
) -> list[Task]:
    """Return the tasks of `held_out` that occur in `training`. `id_key` is the id's
    field of a payload."""
    if not training:
        return []
    training_rows = [dict(_leaves(task.payload)) for task in training]
    held_out_rows = [dict(_leaves(task.payload)) for task in held_out]
    fields = _telling_fields(training_rows, held_out_rows, id_key)
    contents = {
        _content(task, row, fields)
        for task, row in zip(training, training_rows, strict=True)
    }
    names = {task.id for task in training if not _COUNTER.fullmatch(task.id)}
    return [
        task
        for task, row in zip(held_out, held_out_rows, strict=True)
        if _content(task, row, fields) in contents or task.id in names
    ]


def _leaves(value: Json, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values in nested objects, as text that is equal for equal values, by
    their path."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, str):
        yield path, json.dumps(" ".join(value.split()))
    else:
        yield path, json.dumps(value, sort_keys=True, default=repr)


def _telling_fields(
    training: Sequence[Mapping[str, str]],
    held_out: Sequence[Mapping[str, str]],
    id_key: str,
) -> list[str]:
    """Return the fields that every row has, that vary within the rows of a split, and
    that do not number the rows: a field that names the split, or the data set, does not
    vary. If there is none, all that vary; if none varies, all that every row has."""
    rows = [*training, *held_out]
    common = set(rows[0]).intersection(*rows) - {id_key}
    varying = [
        field
        for field in common
        if any(len({row[field] for row in split}) > 1 for split in (training, held_out))
    ]
    contents = [
        field
        for field in varying
        if not (_numbers_rows(field, training) and _numbers_rows(field, held_out))
    ]
    return sorted(contents or varying or common)


def _numbers_rows(field: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether the field has a name of an id, and counts these rows from 0 or 1."""
    if not _ID_FIELD.fullmatch(field):
        return False
    values = {row[field] for row in rows}
    counts = [{str(start + n) for n in range(len(rows))} for start in (0, 1)]
    return values in counts


def _content(task: Task, row: Mapping[str, str], fields: Sequence[str]) -> str:
    if not fields:
        return json.dumps([row, task.label], sort_keys=True, default=repr)
    return json.dumps([row[field] for field in fields])
