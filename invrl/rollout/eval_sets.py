"""What an evaluation runs on: the held-out sets that `eval_sets` names, or the one unnamed set.

Invariant: the same configuration and seed give the same tasks in the same order. `load_eval_sets` is
called before a process starts, where it finds every mistake, and by each evaluation."""

from __future__ import annotations

import re

from invrl.errors import ConfigError
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks import load_eval_tasks
from invrl.types import Task

_ENTRY, _SOURCE = re.compile(r"([\w.-]{1,64})=(.+)"), re.compile(r"[\w.]+:\w+")


def load_eval_sets(config: RolloutConfig, seed: int) -> dict[str, tuple[Task, ...]]:
    """The first `eval_tasks` tasks (0: all) of each set by name; the name is empty where none was given.
    Raises ConfigError, PluginError."""
    if not config.eval_sets:
        return {"": load_eval_tasks(config, seed)}
    sets: dict[str, tuple[Task, ...]] = {}
    for entry in config.eval_sets:
        parts = _ENTRY.fullmatch(entry)
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
    """As `invrl eval` reads it: a task file is what is evaluated. Raises ConfigError without exactly one
    place that tasks come from."""
    if config.eval_sets:
        return config
    file = config.eval_task_file or config.task_file
    if bool(file) == bool(config.task_source_path):
        reason = f"tasks come from the file {file} as well" if file else "there are no tasks"
        fix = "give one of --task-file and --task-source-path, or --eval-sets, which goes before both"
        raise ConfigError("task_source_path", config.task_source_path, reason, fix)
    return config.model_copy(update={"task_file": "", "eval_task_file": file})
