"""Where tasks come from: a source function by import path, or a JSONL or Parquet file; for an evaluation
the held-out sets that `eval_sets` names, or the one unnamed set.

Invariants: the same split and seed give the same tasks in the same order; the ids of one iterator
are distinct (the n-th repeat of an id is "id@n"); "eval" is finite. `check_tasks` and `load_eval_sets` find
every mistake before a process starts; `load_tasks` feeds the buffer and the evaluation."""

import datetime
import decimal
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import orjson

from invrl import plugins
from invrl.errors import ConfigError, PluginError, UnsendableTask
from invrl.interfaces import TaskSource
from invrl.rollout.config import RolloutConfig
from invrl.store.lease_store import encoded_task
from invrl.types import Json, Task

_Rows = list[tuple[int, dict[str, Json]]]
"""Number (from 1) and fields of each line of a file that is not blank, or of each row of a Parquet file."""


def load_tasks(config: RolloutConfig, split: str, seed: int) -> Iterator[Task]:
    """Tasks of "train" (without end, shuffled again for each epoch) or "eval" (finite, in order of
    the file or source). Raises ConfigError, PluginError where the tasks cannot be had."""
    if config.task_source_path:
        source = plugins.load_plugin(config.task_source_path, "task_source_path", TaskSource)
        return _distinct(_checked_passes(source, config.task_source_path, split, seed))
    tasks = _read_split(config, split)
    return _distinct(_shuffled_epochs(tasks, seed)) if split == "train" else iter(tasks)


def load_eval_tasks(config: RolloutConfig, seed: int) -> tuple[Task, ...]:
    """The first `eval_tasks` held-out tasks (0: all); all runs with this seed see the same ones. Raises
    ConfigError if there are fewer."""
    tasks = tuple(islice(load_tasks(config, "eval", seed), config.eval_tasks or None))
    if len(tasks) < config.eval_tasks:
        reason = f"the split 'eval' has {len(tasks)} tasks"
        fix = f"ask for at most {len(tasks)}, or add held-out tasks"
        raise ConfigError("eval_tasks", config.eval_tasks, reason, fix)
    return tasks


def check_tasks(config: RolloutConfig, seed: int) -> None:
    """Everything about tasks that can be wrong, found now. Reads the files whole, and of a source the
    first training task and the held-out tasks. Raises ConfigError, PluginError."""
    _check_one_place(config, config.task_file)
    unnamed = config.eval_tasks and not config.eval_sets  # named sets: `load_eval_sets`
    if unnamed and config.task_file and not config.eval_task_file:
        reason = f"{config.eval_tasks} held-out tasks are asked for and training tasks come from a file"
        raise ConfigError("eval_task_file", "", reason, "give --eval-task-file, or --eval-tasks 0")
    if config.external_environments:
        _check_sendable(config, seed)
    next(load_tasks(config, "train", seed))
    if unnamed:
        load_eval_tasks(config, seed)


def label_notes(config: RolloutConfig) -> list[str]:
    """What is odd about the labels of the task files. A run may do without them; its author should know."""
    notes: list[str] = []
    for field in ("task_file", "eval_task_file"):
        file: str = getattr(config, field)
        if not file or (field == "eval_task_file" and not config.eval_tasks):
            continue
        rows = _read_rows(field, file)
        key = config.task_label_key
        labels = _column(rows, field, file, "task_label_key", key)
        if labels is None:
            fields = ", ".join(sorted(rows[0][1]))
            notes.append(
                f"no task of {file} has the field {key!r}, so every Task.label is None; "
                f"--task-label-key names another (the file has: {fields})"
            )
        elif all(label in (None, "", [], {}) for label in labels):
            notes.append(f"the labels of {file} (field {key!r}) are all empty")
    return notes


def _check_sendable(config: RolloutConfig, seed: int) -> None:
    """Environments that we do not start get tasks as JSON. Checks all of a file, the first of a source."""
    from_file = bool(config.task_file)
    tasks = _read_split(config, "train") if from_file else islice(load_tasks(config, "train", seed), 1)
    for task in tasks:
        try:
            encoded_task(task)
        except UnsendableTask as error:
            field = "task_file" if from_file else "task_source_path"
            fix = "use JSON's types only (no lone surrogates in text), or run without --external-environments"
            raise ConfigError(field, getattr(config, field), str(error), fix) from error


def _check_one_place(config: RolloutConfig, file: str) -> None:
    if bool(config.task_source_path) == bool(file):
        reason = f"both a task source and the file {file} are given" if file else "there are no tasks"
        fix = "give one of --task-source-path and --task-file"
        raise ConfigError("task_source_path", config.task_source_path, reason, fix)


_ID_FIX = "give each task an id of 1 to 256 characters, in Unicode"


def _usable_id(name: str) -> bool:
    """Ids travel in JSON and become part of group ids: no lone surrogates, no essays."""
    return 0 < len(name) <= 256 and name.encode(errors="replace").decode() == name


def _checked_passes(source: TaskSource, path: str, split: str, seed: int) -> Iterator[Task]:
    """One pass of the source for "eval"; for "train" a source that ends is started again."""
    for _ in count() if split == "train" else range(1):
        task = None
        try:
            for task in source(split, seed):
                if not isinstance(task, Task):
                    raise _source_error(path, f"{split!r} yielded a {type(task).__name__}, not a Task")
                if not (isinstance(task.id, str) and _usable_id(task.id)):
                    raise _source_error(path, f"{split!r} yielded the task id {task.id!r}: {_ID_FIX}")
                yield task
        except PluginError:
            raise
        except Exception as error:
            raise _source_error(path, f"the split {split!r} with seed {seed} raised {error!r}") from error
        if task is None:
            raise _source_error(path, f"the split {split!r} has no tasks")


def _source_error(path: str, reason: str) -> PluginError:
    fix = "let it yield invrl.types.Task objects for the splits 'train' and 'eval'"
    return PluginError("task_source_path", path, reason, fix)


def _distinct(tasks: Iterator[Task]) -> Iterator[Task]:
    seen: dict[str, int] = {}
    for task in tasks:
        times = seen.get(task.id, 0)
        seen[task.id] = times + 1
        yield replace(task, id=f"{task.id}@{times}") if times else task


def _shuffled_epochs(tasks: list[Task], seed: int) -> Iterator[Task]:
    draw = random.Random(f"tasks/{seed}")
    while True:
        yield from draw.sample(tasks, len(tasks))


def _read_split(config: RolloutConfig, split: str) -> list[Task]:
    field = "task_file" if split == "train" else "eval_task_file"
    file: str = getattr(config, field)
    rows = _read_rows(field, file)
    ids = _column(rows, field, file, "task_id_key", config.task_id_key)
    labels = _column(rows, field, file, "task_label_key", config.task_label_key)
    tasks: list[Task] = []
    first_line: dict[str, int] = {}
    for at, (line, row) in enumerate(rows):
        name = str(line) if ids is None else _id_text(ids[at], field, file, line)
        if name in first_line:
            reason = f"{_unit(file)}s {first_line[name]} and {line} have the same id {name!r}"
            raise ConfigError(field, file, reason, "make ids unique")
        first_line[name] = line
        tasks.append(Task(id=name, payload=row, label=None if labels is None else labels[at], split=split))
    return tasks


def _unit(file: str) -> str:
    return "row" if file.lower().endswith(".parquet") else "line"


def _read_rows(field: str, file: str) -> _Rows:
    parquet, fix = _unit(file) == "row", "give a JSONL file in UTF-8, one JSON object per line"
    fix = "give a Parquet file, one row per task" if parquet else fix
    try:
        rows = _parquet_rows(file) if parquet else _json_rows(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, NotImplementedError, ImportError) as error:  # pyarrow raises all of these
        raise ConfigError(field, file, f"cannot be read: {error}", fix) from error
    if not rows:
        raise ConfigError(field, file, "has no tasks", fix)
    return rows


def _json_rows(text: str) -> _Rows:
    rows: _Rows = []
    # Only "\n" ends a line of JSONL: str.splitlines would cut at U+2028 inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is a JSON {type(row).__name__}, not an object")
        rows.append((number, row))
    return rows


def _parquet_rows(file: str) -> _Rows:
    """Lists and structs as they are, a map as pairs, times in ISO 8601, decimals as floats, NaN and infinity
    as null."""
    from pyarrow import parquet

    rows: _Rows = []
    for number, row in enumerate(parquet.ParquetFile(file).read().to_pylist(), start=1):
        try:
            rows.append((number, orjson.loads(orjson.dumps(row, default=_json))))
        except orjson.JSONEncodeError as error:
            raise ValueError(f"row {number} holds what JSON does not have: {error}") from error
    return rows


def _json(value: object) -> float | str:
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, datetime.date | datetime.time):  # pandas' own kinds, where it is installed
        return value.isoformat()
    raise TypeError


def _column(rows: _Rows, field: str, file: str, key_field: str, key: str) -> list[Json] | None:
    """The values under `key`, one per row. None if no row has it and the key is the default one, which
    may be absent. ConfigError names the first line that lacks it."""
    lacking = [line for line, row in rows if key not in row]
    if not lacking:
        return [row[key] for _, row in rows]
    if len(lacking) == len(rows) and key == RolloutConfig.model_fields[key_field].default:
        return None
    fields, unit = ", ".join(sorted(rows[0][1])), _unit(file)
    reason = f"{unit} {lacking[0]} has no field {key!r} ({unit} {rows[0][0]} has: {fields})"
    fix = f"add the field, or name another with --{key_field.replace('_', '-')}"
    raise ConfigError(field, file, reason, fix)


def _id_text(value: Json, field: str, file: str, line: int) -> str:
    name = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if name is not None and _usable_id(name):
        return name
    reason = f"{_unit(file)} {line}: the id {value!r} is not a string or integer that can be used"
    raise ConfigError(field, file, reason, _ID_FIX)


_SET = re.compile(r"([\w.-]{1,64})=(.+)")
_SOURCE = re.compile(r"[\w.]+:\w+|.+\.py:\w+")
"""An import path, by module or by file; anything else is a file of tasks."""


def load_eval_sets(config: RolloutConfig, seed: int) -> dict[str, tuple[Task, ...]]:
    """The first `eval_tasks` tasks (0: all) of each set by name; the name is empty where none was given.
    Raises ConfigError, PluginError."""
    if not config.eval_sets:
        return {"": load_eval_tasks(config, seed)}
    sets: dict[str, tuple[Task, ...]] = {}
    for entry in config.eval_sets:
        parts = _SET.fullmatch(entry)
        if parts is None or parts[1] in sets:
            reason = "not NAME=WHERE, the name of letters, digits, '.', '_', '-'"
            reason = f"another set is called {parts[1]!r}" if parts else reason
            fix = "write name=tasks.jsonl or name=module:source, each name once"
            raise ConfigError("eval_sets", entry, reason, fix)
        name, where = parts.groups()
        source, file = (where, "") if _SOURCE.fullmatch(where) else ("", where)
        place = {"task_source_path": source, "eval_task_file": file}
        try:
            sets[name] = load_eval_tasks(config.model_copy(update=place), seed)
        except ConfigError as error:
            raise type(error)("eval_sets", entry, error.reason, error.fix) from error
    return sets


def held_out_only(config: RolloutConfig) -> RolloutConfig:
    """As `invrl eval` reads it: a task file is held out, and our own workers run the rollouts. ConfigError
    without exactly one place of tasks."""
    here = config.model_copy(update={"external_environments": False})
    if here.eval_sets:
        return here
    file = here.eval_task_file or here.task_file
    _check_one_place(here, file)
    return here.model_copy(update={"task_file": "", "eval_task_file": file})
