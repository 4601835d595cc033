"""The files that a run reads tasks from, and how an entry of `eval.sets` names a file
or a source."""

import re

from invrl.errors import ConfigError
from invrl.rollout.config import RolloutConfig

EVAL_SET_FIX = "write name=tasks.jsonl or name=module:source, each name once"
_EVAL_SET = re.compile(r"([\w.-]{1,64})=(.+)")
_SOURCE_PATH = re.compile(r"[\w.]+:\w+|.+\.py:\w+")
"""An import path, by module or by file. Anything else is a file of tasks."""


def split_eval_set(entry: str) -> tuple[str, str]:
    """Return the name and the location of an entry of `eval.sets`. Raises
    ConfigError."""
    match = _EVAL_SET.fullmatch(entry)
    if match is None:
        reason = "not NAME=WHERE, the name of letters, digits, '.', '_', '-'"
        raise ConfigError("eval.sets", entry, reason, EVAL_SET_FIX)
    return match[1], match[2]


def is_source(location: str) -> bool:
    """Whether the location of a held-out set is the import path of a task source, not a
    file."""
    return _SOURCE_PATH.fullmatch(location) is not None


def held_out_files(config: RolloutConfig) -> list[tuple[str, str]]:
    """Return the files of held-out tasks that the run reads, each with the setting that
    names it. Raises ConfigError for an entry of `eval.sets` that is none."""
    trains = bool(config.task_file or config.task_source_path)
    if config.eval.sets:
        locations = [split_eval_set(entry)[1] for entry in config.eval.sets]
        return [
            ("eval.sets", location) for location in locations if not is_source(location)
        ]
    if not config.eval.task_file or (trains and not config.eval.tasks):
        return []
    return [("eval.task_file", config.eval.task_file)]


def task_files(config: RolloutConfig) -> list[tuple[str, str]]:
    """Return the file of training tasks, if there is one, then those of held-out
    tasks."""
    files = held_out_files(config)
    if config.task_file:
        return [("task_file", config.task_file), *files]
    return files
