"""Where tasks come from: a source function by import path, or a JSONL or Parquet file;
for an evaluation the held-out sets that `eval.sets` names, or the one unnamed set.

Invariants: the same split and seed give the same tasks in the same order; a source or
curriculum that records outcomes does so for the same outcomes; "eval" is finite and its
ids are distinct (later tasks with an id that occurred before are called "id@1", "id@2",
...; the buffer does the same for "train"). `check_tasks` and `load_eval_sets` find
every mistake before a process starts. `load_tasks` supplies the buffer and the
evaluation."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import cast

from invrl.errors import ConfigError, PluginError, UnsendableTaskError
from invrl.interfaces import OutcomeRecorder, StateKeeper, TaskSource
from invrl.rollout.config import CurriculumConfig, RolloutConfig
from invrl.rollout.tasks.curriculum import CURRICULA, Curriculum
from invrl.rollout.tasks.curriculum import MAX_TASKS as CURRICULUM_MAX_TASKS
from invrl.rollout.tasks.source_check import check_feedback, has_feedback
from invrl.rollout.tasks.task_files import EVAL_SET_FIX, is_source, split_eval_set
from invrl.rollout.tasks.task_labels import label_key, task_rows
from invrl.store.lease_store import encoded_task
from invrl.store.row_file import Rows, row_unit
from invrl.types.task_ids import USABLE_ID_FIX, DistinctIds, is_usable_id
from invrl.types.tasks import Json, Task
from invrl.user_code import plugins


def load_tasks(config: RolloutConfig, split: str, seed: int) -> Iterator[Task]:
    """Load the tasks of "train" (endless; a file is reshuffled for each epoch) or
    "eval" (finite, in the order of the file or source). Those of "train" are a source's
    own object if it records outcomes or keeps its state, or a `Curriculum`. Raises
    ConfigError, PluginError if they cannot be loaded."""
    if split == "train":
        return _load_training_tasks(config, seed)
    if config.task_source_path:
        call = partial(_load_source(config), split, seed)
        return _distinct(_checked_pass(call, config.task_source_path, split, seed))
    return iter(read_task_file(config, split))


def _load_training_tasks(config: RolloutConfig, seed: int) -> Iterator[Task]:
    """Load tasks with unchanged ids, so a repeated task has its earlier id."""
    curriculum = config.curriculum
    if curriculum is not None:
        tasks = _listed_tasks(config, curriculum, seed)
        return Curriculum(
            tasks, CURRICULA[curriculum.kind], decay=curriculum.decay, seed=seed
        )
    if not config.task_source_path:
        return _shuffled_epochs(read_task_file(config, "train"), seed)
    path = config.task_source_path
    call = partial(_load_source(config), "train", seed)
    with _source_errors(path, "train", seed):
        first_pass = call()
    if has_feedback(first_pass):
        return first_pass
    return chain.from_iterable(
        _checked_pass(next_call, path, "train", seed)
        for next_call in chain([lambda: first_pass], repeat(call))
    )


def _load_source(config: RolloutConfig) -> TaskSource:
    return plugins.load_plugin(
        config.task_source_path or "", "task_source_path", TaskSource
    )


def _listed_tasks(
    config: RolloutConfig, curriculum: CurriculumConfig, seed: int
) -> list[Task]:
    """Return the training tasks that the curriculum picks from, with distinct ids.
    Raises ConfigError if there are too many or too few, or if the source picks its
    tasks by itself."""
    field = "curriculum.tasks"
    wanted = curriculum.tasks
    if config.task_source_path:
        path = config.task_source_path
        with _source_errors(path, "train", seed):
            first_pass = _load_source(config)("train", seed)
        if has_feedback(first_pass):
            reason = (
                f"the task source {path} is told outcomes and picks its tasks by itself"
            )
            raise ConfigError(
                "curriculum", curriculum.kind, reason, "leave --curriculum out"
            )
        checked = _checked_pass(lambda: first_pass, path, "train", seed)
        tasks = list(_distinct(islice(checked, wanted or CURRICULUM_MAX_TASKS + 1)))
    else:
        tasks = read_task_file(config, "train")[:wanted]
    if len(tasks) > CURRICULUM_MAX_TASKS:
        reason = f"there are more than {CURRICULUM_MAX_TASKS} training tasks, or they have no end"
        fix = f"give --curriculum.tasks N, at most {CURRICULUM_MAX_TASKS}, to pick among the first N"
        raise ConfigError(field, wanted, reason, fix)
    if wanted is not None and len(tasks) < wanted:
        reason = f"there are {len(tasks)} training tasks"
        raise ConfigError(
            field,
            wanted,
            reason,
            f"ask for at most {len(tasks)}, or leave it out for all",
        )
    return tasks


def load_eval_tasks(config: RolloutConfig, seed: int) -> tuple[Task, ...]:
    """The first `eval.tasks` held-out tasks, or all. Every run with the same seed gets
    the same ones. Raises ConfigError if there are fewer."""
    tasks = tuple(islice(load_tasks(config, "eval", seed), config.eval.tasks or None))
    if config.eval.tasks is not None and len(tasks) < config.eval.tasks:
        reason = f"the split 'eval' has {len(tasks)} tasks"
        fix = f"ask for at most {len(tasks)}, or add held-out tasks"
        raise ConfigError("eval.tasks", config.eval.tasks, reason, fix)
    return tasks


def check_tasks(config: RolloutConfig, seed: int) -> None:
    """Check everything about tasks that can be wrong. Reads files whole, and of a
    source the first training task and the held-out tasks. Raises ConfigError,
    PluginError."""
    _check_one_place(config, config.task_file)
    # `load_eval_sets` checks sets that have a name.
    has_unnamed_set = config.eval.tasks is not None and not config.eval.sets
    if has_unnamed_set and config.task_file and not config.eval.task_file:
        reason = f"{config.eval.tasks} held-out tasks are asked for and training tasks come from a file"
        raise ConfigError(
            "eval.task_file", "", reason, "give --eval.task-file, or --no-eval.tasks"
        )
    if config.external_environments:
        _check_sendable(config, seed)
    tasks = load_tasks(config, "train", seed)
    if isinstance(tasks, Curriculum) or not has_feedback(tasks):
        next(tasks)
    else:
        check_feedback(
            config.task_source_path or "", lambda: load_tasks(config, "train", seed)
        )
    if has_unnamed_set:
        load_eval_tasks(config, seed)


def feedback_notes(config: RolloutConfig, seed: int) -> list[str]:
    """Return notes about a task source that records outcomes and cannot keep them over
    a resume."""
    if not config.task_source_path or config.curriculum is not None:
        return []
    tasks = load_tasks(config, "train", seed)
    if isinstance(tasks, StateKeeper) or not isinstance(tasks, OutcomeRecorder):
        return []
    return [
        f"{config.task_source_path} is told outcomes and has no state() and restore(): after a resume it "
        "begins anew and knows none of them"
    ]


def _check_sendable(config: RolloutConfig, seed: int) -> None:
    """Check that tasks can be written as JSON for external environments: all tasks of a
    file, the first of a source."""
    if config.task_file:
        field = "task_file"
        tasks = iter(read_task_file(config, "train"))
    else:
        field = "task_source_path"
        tasks = islice(load_tasks(config, "train", seed), 1)
    for task in tasks:
        try:
            encoded_task(task)
        except UnsendableTaskError as error:
            fix = "use JSON's types only (no lone surrogates in text), or run without --external-environments"
            raise ConfigError(field, getattr(config, field), str(error), fix) from error


_TRAINING_FIX = "give one of --task-source-path and --task-file"
_HELD_OUT_FIX = (
    "give one of --task-file FILE, --eval.sets NAME=FILE and --task-source-path module:source (its split "
    "'eval'), or a --config that names tasks"
)


def _check_one_place(
    config: RolloutConfig, file: str | None, *, fix: str = _TRAINING_FIX
) -> None:
    """Check that tasks come from either a source or a file."""
    if config.task_source_path and file:
        reason = f"both a task source and the file {file} are given"
    elif not config.task_source_path and not file:
        reason = "there are no tasks"
    else:
        return
    raise ConfigError("task_source_path", config.task_source_path, reason, fix)


def _checked_pass(
    call: Callable[[], object], path: str, split: str, seed: int
) -> Iterator[Task]:
    """Yield the tasks that one call of the source returns. Raises PluginError for any
    error of the source."""
    task = None
    with _source_errors(path, split, seed):
        for task in cast(Iterator[object], call()):
            if not isinstance(task, Task):
                kind = type(task).__name__
                raise _source_error(path, f"{split!r} yielded a {kind}, not a Task")
            if not is_usable_id(task.id):
                reason = f"{split!r} yielded the task id {task.id!r}: {USABLE_ID_FIX}"
                raise _source_error(path, reason)
            yield task
    if task is None:
        raise _source_error(path, f"the split {split!r} has no tasks")


@contextmanager
def _source_errors(path: str, split: str, seed: int) -> Iterator[None]:
    """Raise PluginError for an error of the source within the block."""
    try:
        yield
    except PluginError:
        raise
    except Exception as error:
        reason = f"the split {split!r} with seed {seed} raised {error!r}"
        raise _source_error(path, reason) from error


def _source_error(path: str, reason: str) -> PluginError:
    fix = "let it yield invrl.types.Task objects for the splits 'train' and 'eval'"
    return PluginError("task_source_path", path, reason, fix)


def _distinct(tasks: Iterator[Task]) -> Iterator[Task]:
    ids = DistinctIds()
    for task in tasks:
        yield replace(task, id=ids.distinct(task.id))


def _shuffled_epochs(tasks: list[Task], seed: int) -> Iterator[Task]:
    rng = random.Random(f"tasks/{seed}")
    while True:
        yield from rng.sample(tasks, len(tasks))


def read_task_file(config: RolloutConfig, split: str) -> list[Task]:
    """Return the tasks of the file of split "train" or "eval", in its order. Raises
    ConfigError."""
    if split == "train":
        field = "task_file"
        file = config.task_file or ""
    else:
        field = "eval.task_file"
        file = config.eval.task_file or ""
    rows = task_rows(field, file)
    ids = _column(rows, field, file, "task_id_key", config.task_id_key)
    labels = _column(
        rows, field, file, "task_label_key", label_key(rows, config.task_label_key)
    )
    tasks: list[Task] = []
    first_number: dict[str, int] = {}
    for index, (number, row) in enumerate(rows):
        task_id = str(number)
        if ids is not None:
            task_id = _id_text(ids[index], field, file, number)
        if task_id in first_number:
            reason = f"{row_unit(file)}s {first_number[task_id]} and {number} have the same id {task_id!r}"
            raise ConfigError(field, file, reason, "make ids unique")
        first_number[task_id] = number
        label = None
        if labels is not None:
            label = labels[index]
        tasks.append(Task(id=task_id, payload=row, label=label, split=split))
    return tasks


def _column(
    rows: Rows, field: str, file: str, key_field: str, key: str
) -> list[Json] | None:
    """Return the value of `key` in each row. None if no row has the key and `key` is
    the default of the setting `key_field`. Raises ConfigError, which names the first
    row without the key."""
    numbers_without = [number for number, row in rows if key not in row]
    if not numbers_without:
        return [row[key] for _, row in rows]
    is_default = key == RolloutConfig.model_fields[key_field].default
    if len(numbers_without) == len(rows) and is_default:
        return None
    unit = row_unit(file)
    first_number, first_row = rows[0]
    names = ", ".join(sorted(first_row))
    reason = f"{unit} {numbers_without[0]} has no field {key!r} ({unit} {first_number} has: {names})"
    fix = f"add the field, or name another with --{key_field.replace('_', '-')}"
    raise ConfigError(field, file, reason, fix)


def _id_text(value: Json, field: str, file: str, number: int) -> str:
    """Return the id of a row as text. Raises ConfigError unless it is a usable string
    or an integer."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        text = str(value)
        if is_usable_id(text):
            return text
    reason = f"{row_unit(file)} {number}: the id {value!r} is not a string or integer that can be used"
    raise ConfigError(field, file, reason, USABLE_ID_FIX)


def load_eval_sets(config: RolloutConfig, seed: int) -> dict[str, tuple[Task, ...]]:
    """The first `eval.tasks` tasks, or all, of each set, by the set's name. Without
    `eval.sets` there is one set, whose name is empty. Raises ConfigError,
    PluginError."""
    if not config.eval.sets:
        return {"": load_eval_tasks(config, seed)}
    sets: dict[str, tuple[Task, ...]] = {}
    for entry in config.eval.sets:
        name, location = split_eval_set(entry)
        if name in sets:
            raise ConfigError(
                "eval.sets", entry, f"another set is called {name!r}", EVAL_SET_FIX
            )
        source = location if is_source(location) else None
        file = None if source else location
        held_out = config.eval.model_copy(update={"task_file": file})
        alone = config.model_copy(update={"task_source_path": source, "eval": held_out})
        try:
            sets[name] = load_eval_tasks(alone, seed)
        except ConfigError as error:
            raise type(error)("eval.sets", entry, error.reason, error.fix) from error
    return sets


def held_out_only(config: RolloutConfig) -> RolloutConfig:
    """Return the configuration as `invrl eval` reads it: the task file holds held-out
    tasks, and our own workers run the rollouts. Raises ConfigError unless tasks come
    from exactly one place."""
    eval_config = config.model_copy(update={"external_environments": False})
    if eval_config.eval.sets:
        return eval_config
    file = eval_config.eval.task_file or eval_config.task_file
    _check_one_place(eval_config, file, fix=_HELD_OUT_FIX)
    held_out = eval_config.eval.model_copy(update={"task_file": file})
    return eval_config.model_copy(update={"task_file": None, "eval": held_out})
