"""The list of checks, with the commands that need each.

`invrl doctor` makes all checks that `train` could need and reports each. `train`,
`serve` and `eval` make theirs in the order of the list, stop at the first error, and
print warnings as warnings. Packages come first: the other checks may need one that is
missing. A check that reads the model folder names that folder's check as its
precondition and does not repeat it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from invrl.cli.checks import (
    code_checks,
    data_checks,
    machine_checks,
    model_checks,
    settings_checks,
    task_checks,
)
from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.machine import Machine
from invrl.run.settings.config import Config
from invrl.run.settings.folder import check_run_folder

DOCTOR = frozenset({"doctor"})
TRAIN = DOCTOR | {"train"}
EVAL = frozenset({"eval"})
ROLLOUTS = TRAIN | EVAL
EVERY = ROLLOUTS | {"serve"}
STORING = EVAL | {"serve"}
"""The commands whose runs write no checkpoint."""
WITH_METRICS = TRAIN | {"serve"}
"""Commands that show metrics."""
ENGINES = EVERY | {"engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check raises ConfigError for what would stop a run and `CheckWarning` for what
    may; it returns what it found."""

    name: str
    look: Callable[[Config, Machine], object]
    commands: frozenset[str]
    trainer_alone: bool = False
    """Whether a run of only the trainer needs it, without engines, gateway and
    rollouts."""
    on_data: bool = False
    """Whether a run on `--data-path` needs it, too."""
    needs: str = ""
    """Earlier check that must have passed. Empty: none."""


def _of_machine(
    name: str,
    look: Callable[[Config, Machine], object],
    commands: frozenset[str] = DOCTOR,
) -> Check:
    return Check(name=name, look=look, commands=commands, trainer_alone=True)


def _of_settings(
    name: str,
    look: Callable[[Config], object],
    commands: frozenset[str],
    *,
    trainer_alone: bool = False,
    on_data: bool = False,
    needs: str = "",
) -> Check:
    return Check(
        name=name,
        look=lambda config, machine: look(config),
        commands=commands,
        trainer_alone=trainer_alone,
        on_data=on_data,
        needs=needs,
    )


_MODEL_FOLDER = "model folder"
_TRAINABLE_MODEL = "trainable model"
_ROUTER = "router"
_TASKS = "tasks"
_ROLLOUT_FUNCTION = "rollout function"
_REWARD_FUNCTION = "reward function"


CHECKS = (
    _of_machine("python", machine_checks.check_python),
    _of_machine("packages", machine_checks.check_packages, ENGINES),
    _of_settings(_MODEL_FOLDER, model_checks.check_model, ENGINES, trainer_alone=True),
    _of_settings(
        "chat template",
        model_checks.check_template,
        EVERY,
        on_data=True,
        needs=_MODEL_FOLDER,
    ),
    _of_settings(
        _TRAINABLE_MODEL,
        model_checks.check_trainable,
        TRAIN,
        trainer_alone=True,
        needs=_MODEL_FOLDER,
    ),
    _of_settings(
        "reference model",
        model_checks.check_reference,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    _of_settings(
        "teacher",
        model_checks.check_teacher,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    _of_settings(
        "critic",
        model_checks.check_critic,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    _of_settings(
        "servable model", model_checks.check_servable, TRAIN, needs=_TRAINABLE_MODEL
    ),
    Check(
        name="engine for the model",
        look=model_checks.check_engine_here,
        commands=ENGINES,
        needs=_MODEL_FOLDER,
    ),
    _of_settings(_ROLLOUT_FUNCTION, settings_checks.check_rollout_function, ROLLOUTS),
    _of_settings(
        "rollout code",
        code_checks.check_rollout_code,
        ROLLOUTS,
        needs=_ROLLOUT_FUNCTION,
    ),
    _of_settings(_REWARD_FUNCTION, settings_checks.check_reward_function, ROLLOUTS),
    _of_settings(
        "reward code", code_checks.check_reward_code, ROLLOUTS, needs=_REWARD_FUNCTION
    ),
    _of_settings(
        "row length", settings_checks.check_row_length, TRAIN, needs=_MODEL_FOLDER
    ),
    _of_settings("held-out sets", task_checks.check_eval_sets, TRAIN),
    _of_settings("held-out tasks", task_checks.check_held_out_tasks, EVAL),
    _of_settings(_TASKS, task_checks.check_tasks, TRAIN),
    _of_settings(
        "held-out tasks apart", task_checks.check_held_out_apart, TRAIN, needs=_TASKS
    ),
    _of_settings("labels", task_checks.check_labels, TRAIN, needs=_TASKS),
    _of_settings("labels", task_checks.check_held_out_labels, EVAL),
    _of_settings("algorithm functions", settings_checks.check_algorithm, TRAIN),
    _of_settings("off-policy correction", settings_checks.check_off_policy, TRAIN),
    _of_settings("lost rollouts", settings_checks.check_lost_rollouts, TRAIN),
    _of_settings(
        "magnitudes", settings_checks.check_magnitudes, TRAIN, trainer_alone=True
    ),
    _of_settings("trackers", settings_checks.check_trackers, TRAIN, trainer_alone=True),
    _of_settings("traces", settings_checks.check_traces, EVERY),
    _of_settings(
        "training data",
        data_checks.check_data,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    _of_settings(
        "saved batches", settings_checks.check_saved_batches, TRAIN, trainer_alone=True
    ),
    _of_settings("sglang options", settings_checks.check_sglang_options, ENGINES),
    _of_settings(_ROUTER, settings_checks.check_router, EVERY),
    _of_settings(
        "router options", settings_checks.check_router_options, EVERY, needs=_ROUTER
    ),
    _of_settings(
        "megatron options",
        settings_checks.check_megatron_options,
        EVERY,
        trainer_alone=True,
        needs=_MODEL_FOLDER,
    ),
    _of_settings("weight folder", settings_checks.check_weight_folder, TRAIN),
    _of_settings("weight server", settings_checks.check_weight_host, TRAIN),
    _of_settings("gate policy", settings_checks.check_gate_policy, EVERY),
    _of_settings("gateway port", settings_checks.check_gateway_port, EVERY),
    _of_settings(
        "metrics port",
        settings_checks.check_metrics_port,
        WITH_METRICS,
        trainer_alone=True,
    ),
    _of_settings("environment key", settings_checks.check_environment_key, EVERY),
    _of_settings("external engines", settings_checks.check_engine_key, EVERY),
    _of_settings("run folder", check_run_folder, DOCTOR, trainer_alone=True),
    _of_machine("gpu", machine_checks.check_gpu),
    _of_machine("cpus", machine_checks.check_processors, TRAIN),
    _of_machine("precision", machine_checks.check_precision),
    Check(
        name="trainer kernels",
        look=machine_checks.check_trainer_kernels,
        commands=DOCTOR,
        needs=_TRAINABLE_MODEL,
    ),
    _of_machine("trainer memory", machine_checks.check_trainer_memory, TRAIN),
    Check(
        name="longest conversation",
        look=machine_checks.check_longest_row,
        commands=TRAIN,
        needs=_MODEL_FOLDER,
    ),
    _of_machine("memory", machine_checks.check_memory, TRAIN),
    _of_machine("disk", machine_checks.check_disk, TRAIN),
    _of_machine("disk", machine_checks.check_store_disk, STORING),
    _of_machine("temporary files", machine_checks.check_temporary_files, ENGINES),
    Check(
        name="weight folder's disk",
        look=machine_checks.check_weight_disk,
        commands=TRAIN,
    ),
    _of_machine("shared memory", machine_checks.check_shared_memory),
    _of_machine("ray", machine_checks.check_ray),
)


def select_checks(command: str, config: Config) -> list[Check]:
    """Return the checks that `invrl COMMAND` makes with this configuration."""
    return [
        check
        for check in CHECKS
        if command in check.commands and _is_needed(check, config)
    ]


def _is_needed(check: Check, config: Config) -> bool:
    if not config.trains_alone or check.trainer_alone:
        return True
    return config.trains_on_data and check.on_data


def check_before_start(command: str, config: Config, machine: Machine) -> list[str]:
    """Make the checks of the command. Raises ConfigError at the first that fails;
    returns the warnings."""
    warnings: list[str] = []
    for check in select_checks(command, config):
        try:
            check.look(config, machine)
        except CheckWarning as warning:
            warnings.append(
                f"{check.name}: {warning.value}: {warning.reason}. Fix: {warning.fix}"
            )
    return warnings
