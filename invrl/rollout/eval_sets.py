"""What an evaluation runs on: the held-out sets that `eval_sets` names, or the one unnamed set.

Invariant: the same configuration and seed give the same tasks in the same order. `load_eval_sets` is
called before a process starts, where it finds every mistake, and by each evaluation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from invrl.errors import ConfigError
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks import load_eval_tasks
from invrl.types import Task

_NAME, _SOURCE = re.compile(r"[\w.-]{1,64}"), re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Held-out tasks; `name` is empty where none was given."""

    name: str
    tasks: tuple[Task, ...]


def load_eval_sets(config: RolloutConfig, seed: int) -> tuple[EvalSet, ...]:
    """The first `eval_tasks` tasks of each set (0: all). Raises ConfigError, PluginError."""
    if not config.eval_sets:
        return (EvalSet(name="", tasks=load_eval_tasks(config, seed)),)
    sets: dict[str, EvalSet] = {}
    for entry in config.eval_sets:
        name, _, where = entry.partition("=")
        if not where or not _NAME.fullmatch(name):
            reason = "not NAME=WHERE with a name of letters, digits, '.', '_' and '-'"
            raise _refuse(entry, reason, "write name=tasks.jsonl or name=module:source")
        if name in sets:
            raise _refuse(entry, f"another set is called {name!r}", "give each set a name of its own")
        from_source = bool(_SOURCE.fullmatch(where))
        place = {
            "task_source_path": where if from_source else "",
            "eval_task_file": "" if from_source else where,
        }
        try:
            tasks = load_eval_tasks(config.model_copy(update=place), seed)
        except ConfigError as error:
            raise type(error)(field="eval_sets", value=entry, reason=error.reason, fix=error.fix) from error
        sets[name] = EvalSet(name=name, tasks=tasks)
    return tuple(sets.values())


def held_out_only(config: RolloutConfig) -> RolloutConfig:
    """As `invrl eval` reads it: a task file is what is evaluated. Raises ConfigError without exactly one
    place that tasks come from."""
    if config.eval_sets:
        return config
    file = config.eval_task_file or config.task_file
    if bool(file) == bool(config.task_source_path):
        raise ConfigError(
            field="task_source_path",
            value=config.task_source_path,
            reason=f"tasks come from the file {file} as well" if file else "there are no tasks",
            fix="give one of --task-file and --task-source-path, or --eval-sets, which goes before both",
        )
    return config.model_copy(update={"task_file": "", "eval_task_file": file})


def _refuse(entry: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(field="eval_sets", value=entry, reason=reason, fix=fix)
