"""The list of checks, with the commands that need each.

`invrl doctor` makes all checks that `train` could need and reports each. `train`,
`serve` and `eval` make theirs in the order of the list, stop at the first error, and
print warnings as warnings. Packages come first: the other checks may need one that is
missing. A check that reads the model folder names that folder's check as its
precondition and does not repeat it.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from invrl.cli.checks import (
    code_checks,
    data_checks,
    gpu_checks,
    machine_checks,
    model_checks,
    settings_checks,
    task_checks,
)
from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.checks.machine import Machine
from invrl.observe.sinks.trace_checks import check_traces
from invrl.observe.sinks.tracker_checks import check_trackers
from invrl.run.processes.gpu_fit import fitted_to_gpus
from invrl.run.settings.config import Config
from invrl.run.settings.folder import check_run_folder

DOCTOR = frozenset({"doctor"})
TRAIN = DOCTOR | {"train"}
EVAL = frozenset({"eval"})
ROLLOUTS = TRAIN | EVAL
SERVE = frozenset({"serve"})
EVERY = ROLLOUTS | SERVE
STORING = EVAL | SERVE
"""The commands whose runs write no checkpoint."""
WITH_METRICS = TRAIN | SERVE
"""Commands that show metrics."""
ENGINES = EVERY | {"engine"}


@dataclass(frozen=True, slots=True)
class Check:
    """A check raises ConfigError for what would stop a run and `CheckWarning` for what
    may; it returns what it found."""

    name: str
    examine: Callable[..., object]
    """Takes the configuration; and the machine, if the check is `of_machine`."""
    commands: frozenset[str]
    _: KW_ONLY
    of_machine: bool = False
    trainer_alone: bool = False
    """Whether a run of only the trainer needs it, without engines, gateway and
    rollouts."""
    on_data: bool = False
    """Whether a run on `--data-path` needs it, too."""
    needs: str = ""
    """Earlier check that must have passed. Empty: none."""

    def look(self, config: Config, machine: Machine) -> object:
        """Return what the check found. Raises ConfigError, also for a package that the
        check could not import."""
        try:
            if self.of_machine:
                return self.examine(config, machine)
            return self.examine(config)
        except ImportError as error:
            raise machine_checks.packages_missing(error) from error


def _of_machine(
    name: str,
    examine: Callable[[Config, Machine], object],
    commands: frozenset[str] = DOCTOR,
    *,
    trainer_alone: bool = True,
    needs: str = "",
) -> Check:
    return Check(
        name,
        examine,
        commands,
        of_machine=True,
        trainer_alone=trainer_alone,
        needs=needs,
    )


_MODEL_FOLDER = "model folder"
_TRAINABLE_MODEL = "trainable model"
_ROUTER = "router"
_TASKS = "tasks"
_ROLLOUT_FUNCTION = "rollout function"
_REWARD_FUNCTION = "reward function"
_GPU_PLAN = "gpu plan"


CHECKS = (
    _of_machine("python", machine_checks.check_python),
    _of_machine("packages", machine_checks.check_packages, ENGINES),
    Check(_MODEL_FOLDER, model_checks.check_model, ENGINES, trainer_alone=True),
    Check(
        "chat template",
        model_checks.check_template,
        EVERY,
        on_data=True,
        needs=_MODEL_FOLDER,
    ),
    Check("adapters", model_checks.check_adapters, SERVE, needs=_MODEL_FOLDER),
    Check(
        _TRAINABLE_MODEL,
        model_checks.check_trainable,
        TRAIN,
        trainer_alone=True,
        needs=_MODEL_FOLDER,
    ),
    Check(
        "reference model",
        model_checks.check_reference,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    Check(
        "teacher",
        model_checks.check_teacher,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    Check(
        "critic",
        model_checks.check_critic,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    Check("servable model", model_checks.check_servable, TRAIN, needs=_TRAINABLE_MODEL),
    _of_machine(
        "engine for the model",
        model_checks.check_engine_here,
        ENGINES,
        trainer_alone=False,
        needs=_MODEL_FOLDER,
    ),
    Check(_ROLLOUT_FUNCTION, settings_checks.check_rollout_function, ROLLOUTS),
    Check(
        "rollout code",
        code_checks.check_rollout_code,
        ROLLOUTS,
        needs=_ROLLOUT_FUNCTION,
    ),
    Check("environment", settings_checks.check_environment, TRAIN),
    Check(_REWARD_FUNCTION, settings_checks.check_reward_function, ROLLOUTS),
    Check(
        "reward code", code_checks.check_reward_code, ROLLOUTS, needs=_REWARD_FUNCTION
    ),
    Check("row length", settings_checks.check_row_length, TRAIN, needs=_MODEL_FOLDER),
    Check("held-out sets", task_checks.check_eval_sets, TRAIN),
    Check("held-out tasks", task_checks.check_held_out_tasks, EVAL),
    Check(_TASKS, task_checks.check_tasks, TRAIN),
    Check(
        "held-out tasks apart", task_checks.check_held_out_apart, TRAIN, needs=_TASKS
    ),
    Check("labels", task_checks.check_labels, TRAIN, needs=_TASKS),
    Check("labels", task_checks.check_held_out_labels, EVAL),
    Check("algorithm functions", settings_checks.check_algorithm, TRAIN),
    Check("off-policy correction", settings_checks.check_off_policy, TRAIN),
    Check("lost rollouts", settings_checks.check_lost_rollouts, TRAIN),
    Check("magnitudes", settings_checks.check_magnitudes, TRAIN, trainer_alone=True),
    Check(
        "trackers",
        lambda config: check_trackers(config.run),
        TRAIN,
        trainer_alone=True,
    ),
    Check("traces", check_traces, EVERY),
    Check(
        "training data",
        data_checks.check_data,
        TRAIN,
        trainer_alone=True,
        needs=_TRAINABLE_MODEL,
    ),
    Check(
        "saved batches", settings_checks.check_saved_batches, TRAIN, trainer_alone=True
    ),
    Check("sglang options", settings_checks.check_sglang_options, ENGINES),
    Check(_ROUTER, settings_checks.check_router, EVERY),
    Check("router options", settings_checks.check_router_options, EVERY, needs=_ROUTER),
    Check(
        "megatron options",
        settings_checks.check_megatron_options,
        EVERY,
        trainer_alone=True,
        needs=_MODEL_FOLDER,
    ),
    Check("weight folder", settings_checks.check_weight_folder, TRAIN),
    Check("weight server", settings_checks.check_weight_host, TRAIN),
    Check("gate policy", settings_checks.check_gate_policy, EVERY),
    Check("gateway port", settings_checks.check_gateway_port, EVERY),
    Check(
        "metrics port",
        settings_checks.check_metrics_port,
        WITH_METRICS,
        trainer_alone=True,
    ),
    Check("environment key", settings_checks.check_environment_key, EVERY),
    Check("external engines", settings_checks.check_engine_key, EVERY),
    Check("run folder", check_run_folder, DOCTOR, trainer_alone=True),
    _of_machine("gpu", gpu_checks.check_gpu, EVERY),
    _of_machine("cpus", machine_checks.check_processors, TRAIN),
    _of_machine(_GPU_PLAN, gpu_checks.check_plan_of_run, TRAIN),
    _of_machine(_GPU_PLAN, gpu_checks.check_plan_of_engines, STORING),
    _of_machine(
        "divided gpu",
        gpu_checks.check_divided_gpu,
        TRAIN,
        trainer_alone=False,
        needs=_GPU_PLAN,
    ),
    _of_machine("gpu kinds", gpu_checks.check_kinds, TRAIN),
    _of_machine("gpu in use", gpu_checks.check_use_by_others, TRAIN),
    _of_machine("gpu in use", gpu_checks.check_engines_use_by_others, STORING),
    _of_machine("nvcc", gpu_checks.check_nvcc, EVERY, trainer_alone=False),
    _of_machine("precision", machine_checks.check_precision),
    _of_machine(
        "trainer kernels",
        machine_checks.check_trainer_kernels,
        trainer_alone=False,
        needs=_TRAINABLE_MODEL,
    ),
    _of_machine("trainer memory", machine_checks.check_trainer_memory, TRAIN),
    _of_machine(
        "longest conversation",
        machine_checks.check_longest_row,
        TRAIN,
        trainer_alone=False,
        needs=_MODEL_FOLDER,
    ),
    _of_machine("memory", machine_checks.check_memory, TRAIN),
    _of_machine("disk", machine_checks.check_disk, TRAIN),
    _of_machine("disk", machine_checks.check_store_disk, STORING),
    _of_machine("temporary files", machine_checks.check_temporary_files, ENGINES),
    _of_machine(
        "weight folder's disk",
        machine_checks.check_weight_disk,
        TRAIN,
        trainer_alone=False,
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


def fitted(config: Config, machine: Machine) -> Config:
    """Return the configuration with what the machine's GPUs decide in a run."""
    return fitted_to_gpus(config, gpus=machine.gpus, gpu_bytes=machine.gpu_memory_bytes)


def check_before_start(command: str, config: Config, machine: Machine) -> list[str]:
    """Make the checks of the command. Raises ConfigError at the first that fails;
    returns the warnings."""
    warnings: list[str] = []
    if command in TRAIN:
        config = fitted(config, machine)
    for check in select_checks(command, config):
        try:
            check.look(config, machine)
        except CheckWarning as warning:
            warnings.append(
                f"{check.name}: {warning.value}: {warning.reason}. Fix: {warning.fix}"
            )
    return warnings
