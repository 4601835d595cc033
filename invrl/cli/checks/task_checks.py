"""Checks of a run's tasks: that they can be read, have the labels that the code reads,
and that held-out tasks differ from training tasks.

A check takes the configuration, raises ConfigError (or PluginError), and may return
what it found.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from invrl.cli.checks.check_warnings import CheckWarning
from invrl.errors import ConfigError, PluginError
from invrl.rollout.config import RolloutConfig
from invrl.run.settings.config import Config


def check_eval_sets(config: Config) -> None:
    """Check the named held-out sets of a training run."""
    sets = config.rollout.eval.sets
    if not sets:
        return
    if not config.rollout.eval.tasks:
        fix = "set --eval.tasks, or leave --eval.sets out"
        raise ConfigError(
            "eval.sets",
            sets,
            "no evaluation is asked for (eval.tasks is not set)",
            fix,
        )
    check_held_out_tasks(config)


def check_held_out_tasks(config: Config) -> None:
    """Check that all held-out tasks can be read, and that there are as many as the
    settings demand."""
    from invrl.rollout.tasks.tasks import load_eval_sets

    load_eval_sets(config.rollout, config.run.seed)


def check_tasks(config: Config) -> object:
    from invrl.rollout.tasks import tasks

    return tasks.check_tasks(config.rollout, config.run.seed)


_COMPARED_TASKS = 64
"""Training tasks of a source that are compared with held-out tasks: it may be
endless."""


def check_held_out_apart(config: Config) -> str:
    """Check that held-out tasks are not training tasks. Of a possibly endless source,
    only the first training tasks are compared, and only if all of them are held-out
    tasks is it doubted."""
    from invrl.rollout.tasks.held_out_overlap import shared_tasks
    from invrl.rollout.tasks.source_check import has_feedback
    from invrl.rollout.tasks.tasks import load_eval_sets, load_tasks, read_task_file

    rollout = config.rollout
    if not rollout.eval.tasks:
        return "none"
    if rollout.task_file:
        training = read_task_file(rollout, "train")
    else:
        tasks = load_tasks(rollout, "train", config.run.seed)
        training = [] if has_feedback(tasks) else list(islice(tasks, _COMPARED_TASKS))
    faults: list[str] = []
    for name, held_out in load_eval_sets(rollout, config.run.seed).items():
        shared = shared_tasks(training, held_out, id_key=rollout.task_id_key)
        if (
            rollout.task_source_path
            and shared_tasks(held_out, training, id_key="") != training
        ):
            continue
        if shared:
            of_set = f" of the set {name}" if name else ""
            faults.append(
                f"{len(shared)} of {len(held_out)} held-out tasks{of_set} are training tasks too"
            )
    if faults:
        reason = f"{'; '.join(faults)}: what they measure is training accuracy"
        fix = "hold out other tasks, which training never sees (compared by content, and by ids that are names)"
        field = "sets" if rollout.eval.sets else "task_file"
        raise CheckWarning(f"eval.{field}", getattr(rollout.eval, field), reason, fix)
    return "others than those of training"


def check_labels(config: Config) -> str:
    """Check that training and held-out tasks have labels, if the user's code reads
    them."""
    return _labels(config, "train")


def check_held_out_labels(config: Config) -> str:
    """Check that the tasks of `invrl eval` have labels, if the user's code reads
    them."""
    return _labels(config, "eval")


_SEEN_TASKS = 8
"""Tasks of a source that are examined: it may be endless."""


def _source_fault(rollout: RolloutConfig, split: str, seed: int) -> str:
    """Return what is wrong with the labels of a task source's first tasks; "" if
    nothing is, or if they depend on outcomes."""
    from invrl.rollout.tasks.source_check import has_feedback
    from invrl.rollout.tasks.tasks import load_tasks

    if not rollout.task_source_path or (split == "eval" and rollout.eval.sets):
        return ""
    tasks = load_tasks(rollout, split, seed)
    if split == "train" and has_feedback(tasks):
        return ""
    first_tasks = list(islice(tasks, _SEEN_TASKS))
    if any(task.label is not None for task in first_tasks):
        return ""
    return f"the first {len(first_tasks)} tasks of {rollout.task_source_path} have the label None"


def _labels(config: Config, split: str) -> str:
    """Return the fields of the labels, if they were guessed. Raises `CheckWarning` if
    tasks have no label and user code reads one."""
    from invrl.rollout.tasks.task_labels import guess_notes, missing_labels
    from invrl.user_code.source import reads_attribute

    rollout = config.rollout
    source_fault = _source_fault(rollout, split, config.run.seed)
    fault = source_fault or missing_labels(rollout)
    if not fault:
        return "; ".join(guess_notes(rollout)) or "in order"
    for function in _user_functions(config):
        reader = reads_attribute(function, "label")
        if reader:
            reason = f"{fault}, and {reader} reads Task.label: every reward may be that of a wrong answer"
            fix = "name the field with --task-label-key, or read task.payload in the function instead"
            if source_fault:
                fix = "give each Task its label"
            raise CheckWarning(
                "rollout.task_label_key", rollout.task_label_key, reason, fix
            )
    return fault


def _user_functions(config: Config) -> Iterator[Callable[..., Any]]:
    """Yield the rollout function and the reward function. One that cannot be loaded is
    reported elsewhere."""
    from invrl.user_code import plugins

    rollout = config.rollout
    with contextlib.suppress(PluginError):
        if rollout.rollout_function_path:
            yield plugins.load_rollout_function(rollout.rollout_function_path)
    with contextlib.suppress(PluginError):
        if rollout.reward_function_path:
            yield plugins.load_reward_function(rollout.reward_function_path)
