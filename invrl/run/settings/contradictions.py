"""Contradictions between settings, beyond the checks of single fields. They are found
before any process starts.

One function per subject yields its contradictions. `check` is pure: `config.resolve`
runs it. `cli/checks/` checks what the settings name (files, code, models).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from invrl.algorithms.objectives.objectives import ON_ROLLOUTS, is_built_in
from invrl.datasets.config import KIND_OF_OBJECTIVE
from invrl.errors import ConfigError
from invrl.run.settings.algorithm_contradictions import (
    ON_DATA,
    WITH_ROLLOUTS,
    Contradictions,
)
from invrl.run.settings.engine_contradictions import ENGINES, WEIGHTS
from invrl.run.settings.lora_contradictions import adapter, sent_adapter, served_by_name
from invrl.run.settings.placement_contradictions import placement
from invrl.run.settings.trainer_contradictions import TRAINER
from invrl.run.settings.value_suggestions import wrong_name
from invrl.types.section import Section

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_SECRET_PARTS = ("api_key", "password", "secret", "auth_token")
_MAX_COUNT = 2**31 - 1


def check(config: Config) -> None:
    """Raise ConfigError at the first contradiction."""
    values: dict[str, object] = {}
    for table, section in config:
        for name, value in dict(section).items():
            values[f"{table}.{name}"] = value
    for table, section in _tables(config):
        for name, value in section:
            values[f"{table}.{name}"] = value
    for subject in _ON_DATA if config.trains_on_data else _WITH_ROLLOUTS:
        for field, reason, fix in subject(config):
            raise ConfigError(field, values[field], reason, fix)
    for field, reason, fix in _secrets(config):
        raise ConfigError(field, "(not shown)", reason, fix)
    for (
        field,
        value,
    ) in values.items():  # counts are sent as int32 (token ids, positions, versions)
        if isinstance(value, int) and abs(value) > _MAX_COUNT:
            raise ConfigError(field, value, "over 2^31 - 1", "choose a smaller number")


def _names(config: Config) -> Contradictions:
    """Names of algorithms in the wrong setting, and objectives that do not exist."""
    for name in ("objective", "advantage", "policy_loss", "old_logprobs"):
        fix = wrong_name(name, getattr(config.algorithm, name))
        if fix:
            yield (
                f"algorithm.{name}",
                "it is no such name, and not of the form module:name",
                fix,
            )


def _choices(config: Config) -> Contradictions:
    """Contradictions between a choice and the table that holds its settings."""
    for section_name, section in config:
        if not isinstance(section, Section):
            continue
        for table, choice in section.chosen_by.items():
            value = getattr(section, choice.setting)
            is_there = getattr(section, table) is not None
            field = f"{section_name}.{choice.setting}"
            if value in choice.values and not is_there:
                reason = f"it needs the table [{table}], which is turned off"
                yield field, reason, "leave one of the two out"
            if table == "critic" and not is_built_in(config.algorithm.objective):
                continue  # a user's objective may need the values itself
            if is_there and value not in choice.values:
                flag = f"--{choice.setting.replace('_', '-')}"
                readers = ", ".join(choice.values)
                reason = f"it does not read the table [{table}], only {readers}"
                yield field, reason, f"leave {flag} or [{table}] out"


def _data(config: Config) -> Contradictions:
    """Training on a file."""
    data = config.data
    objective = config.algorithm.objective
    if objective in ON_ROLLOUTS:
        reason = "it trains on rollouts, and data_path is given, which makes none"
        fix = f"add --objective {', '.join(KIND_OF_OBJECTIVE)} or one of your own; or leave --data-path out"
        yield "algorithm.objective", reason, fix
    if data.kind not in ("auto", KIND_OF_OBJECTIVE.get(objective, data.kind)):
        reason = f"the objective {objective} trains on {KIND_OF_OBJECTIVE[objective]}"
        yield "data.kind", reason, "leave it out, or choose another --objective"
    if data.eval_path and data.eval_fraction:
        reason = f"held-out rows come from the file {data.eval_path}"
        yield (
            "data.eval_fraction",
            reason,
            "give one of --data.eval-path and --data.eval-fraction",
        )
    if config.algorithm.num_mini_batches > data.batch_size:
        reason = f"a mini-batch is made of whole rows of the file, and a batch has {data.batch_size}"
        yield (
            "algorithm.num_mini_batches",
            reason,
            "lower --num-mini-batches or raise --data.batch-size",
        )
    if objective == "kto" and data.batch_size == 1:
        reason = "kto compares each row of a batch with another one"
        yield "data.batch_size", reason, "set it to 2 or more"
    if data.batch_size < config.train.data_parallel_size:
        reason = f"a batch has {data.batch_size} rows, fewer than there are copies of the model"
        yield (
            "train.data_parallel_size",
            reason,
            "lower --data-parallel-size or raise --data.batch-size",
        )
    if config.run.wandb is not None and config.run.wandb.rollouts is not None:
        yield (
            "wandb.rollouts",
            "with data_path there are no rollouts",
            "leave it out",
        )
    holds_out = bool(data.eval_path or data.eval_fraction)
    if config.rollout.eval.interval and not holds_out:
        reason = "no rows are held out that it could evaluate on"
        fix = "give --data.eval-path or --data.eval-fraction, or leave --eval.interval out"
        yield "eval.interval", reason, fix
    if config.run.checkpoints.keep_best and not holds_out:
        reason = "the best checkpoints are those of the lowest held-out loss, and no rows are held out"
        fix = "give --data.eval-path or --data.eval-fraction, or leave --checkpoints.keep-best out"
        yield "checkpoints.keep_best", reason, fix
    for name in ("debug_train_only", "debug_rollout_only", "colocate"):
        if getattr(config.run, name):
            yield (
                f"run.{name}",
                "a run on data_path starts the trainer alone by itself",
                "leave it out",
            )
    if config.train.routing_replay != "none":
        reason = "no engine has chosen experts, and the data's rows have one pass"
        yield "train.routing_replay", reason, "leave it out"
    yield from _of_rollouts(config)


def _without_data(config: Config) -> Contradictions:
    objective = config.algorithm.objective
    if objective in KIND_OF_OBJECTIVE:
        reason = f"the objective {objective} trains on a file, and none was given"
        yield (
            "data.data_path",
            reason,
            f"give --data-path FILE.jsonl, with {KIND_OF_OBJECTIVE[objective]}",
        )
    for name, default in _defaults(config.data):
        if getattr(config.data, name) != default:
            fix = "give --data-path too, with --objective sft for example; or leave it out"
            yield f"data.{name}", "it is read only where a run trains on data_path", fix


def _of_rollouts(config: Config) -> Contradictions:
    """Settings of parts that a run on a file does not start."""
    used = {
        "rollout": (),
        "workers": (),
        "eval": ("interval",),
        "engine": ("dtype",),
        "gateway": ("chat_template_path", "keep_thinking", "special_tokens_in_content"),
        "session": (),
        "buffer": (),
        "turn_rewards": (),
        "failures": (),
        "weights": (),
    }
    for table, section in _tables(config):
        for name, default in _defaults(section) if table in used else ():
            value = getattr(section, name)
            if name not in used and name not in used[table] and value != default:
                reason = f"with data_path = {config.data.data_path!r} there are no rollouts and no engine"
                yield (
                    f"{table}.{name}",
                    reason,
                    "leave it out, or leave --data-path out",
                )
    for table in ("sglang", "router"):
        for name in getattr(config, table):
            yield (
                f"{table}.{name}",
                "with data_path there is neither engine nor router",
                "leave it out",
            )


def _tables(config: Config) -> Iterator[tuple[str, Section]]:
    """The sections, and the tables that they have."""
    for name, section in config:
        if isinstance(section, Section):
            yield name, section
            for key, part in section:
                if isinstance(part, Section):
                    yield key, part


def _defaults(section: Section) -> Iterator[tuple[str, object]]:
    """Yield each setting of a section with its default."""
    for name, info in type(section).model_fields.items():
        yield name, info.get_default(call_default_factory=True)


def _modes(config: Config) -> Contradictions:
    run = config.run
    if run.debug_rollout_only and run.debug_train_only:
        reason = "the two exclude each other: one turns the trainer off, the other the rollouts"
        yield (
            "run.debug_train_only",
            reason,
            "give one of --debug-rollout-only and --debug-train-only",
        )
    if run.debug_train_only and not run.load_rollout_data:
        reason = "--debug-train-only trains on saved batches"
        yield (
            "run.load_rollout_data",
            reason,
            "give --load-rollout-data RUN/rollout_data",
        )
    for name in ("load_rollout_data", "load_checkpoint"):
        if getattr(run, name) and not run.debug_train_only:
            fix = "add --debug-train-only, or leave it out"
            yield f"run.{name}", "only --debug-train-only reads it", fix


def _schedule(config: Config) -> Contradictions:
    train = config.train
    if (
        train.lr_decay_style != "constant"
        and (train.lr_decay_steps or 0) <= train.lr_warmup_steps
    ):
        reason = f"a {train.lr_decay_style} decay must end after the warm-up of {train.lr_warmup_steps} steps"
        yield (
            "train.lr_decay_steps",
            reason,
            "set --lr-decay-steps to the optimizer steps of the run",
        )
    if train.lr_min > train.lr:
        reason = f"it is above lr = {train.lr}, the highest rate of the schedule"
        yield "train.lr_min", reason, "lower --lr-min or raise --lr"


def _difficulty(config: Config) -> Contradictions:
    bounds = config.buffer.difficulty
    if bounds is not None and bounds.low > bounds.high:
        reason = f"it is above high = {bounds.high}, so no group would be kept"
        yield (
            "difficulty.low",
            reason,
            "lower --difficulty.low or raise --difficulty.high",
        )


def _batch(config: Config) -> Contradictions:
    groups = config.rollout.rollout_batch_size
    samples = config.rollout.n_samples_per_prompt
    ranks = config.train.data_parallel_size
    algorithm = config.algorithm
    if groups * samples < ranks:
        total = groups * samples
        reason = f"a batch has {groups} x {samples} = {total} rollouts, fewer than the {ranks} copies of the model"
        yield (
            "train.data_parallel_size",
            reason,
            "lower --data-parallel-size or raise --rollout-batch-size",
        )
    of_critic = config.critic_layout
    if of_critic is not None and groups * samples < of_critic.data:
        total = groups * samples
        reason = f"a batch has {total} rollouts, fewer than the {of_critic.data} copies of the critic"
        fix = "lower --critic.data-parallel-size or raise --rollout-batch-size"
        yield "critic.data_parallel_size", reason, fix
    if algorithm.num_mini_batches > groups:
        reason = f"a mini-batch is made of whole groups, and a batch has {groups}"
        yield (
            "algorithm.num_mini_batches",
            reason,
            "lower --num-mini-batches or raise --rollout-batch-size",
        )


def _staleness(config: Config) -> Contradictions:
    """Rules for old tokens that nothing would obey, or that cannot be obeyed."""
    buffer = config.buffer
    if buffer.max_staleness == 0:
        fix = "set --max-staleness to 1 or more"
        if buffer.over_sampling_groups:
            reason = "the groups that a batch does not need would be one version old in the next one"
            yield "buffer.over_sampling_groups", reason, f"{fix}, or leave it out"
        if buffer.when_stale == "mask":
            reason = "with --max-staleness 0 every token is as new as the weights"
            yield "buffer.when_stale", reason, f"{fix}, or leave it out"
        if buffer.admission == "ready":
            reason = "with --max-staleness 0 no group is sampled before the last one is trained"
            yield "buffer.admission", reason, f"{fix}, or leave it out"
    elif buffer.when_stale == "wait":
        reason = "so many groups may be under way that some would have to wait for a batch too long"
        fix = "use --when-stale train or mask"
        if buffer.over_sampling_groups:
            yield "buffer.over_sampling_groups", reason, fix
        if buffer.admission == "ready":
            yield "buffer.admission", reason, fix


def _evaluation(config: Config) -> Contradictions:
    rollout = config.rollout
    if rollout.eval.interval and not rollout.eval.tasks:
        reason = "there are no held-out tasks to evaluate on (eval.tasks is not set)"
        yield (
            "eval.interval",
            reason,
            "set --eval.tasks, or leave --eval.interval out",
        )
    if config.run.checkpoints.keep_best_by == "held_out" and not rollout.eval.interval:
        reason = (
            "no checkpoint is evaluated on held-out tasks (eval.interval is not set)"
        )
        yield (
            "checkpoints.keep_best_by",
            reason,
            "set --eval.interval and --eval.tasks, or --checkpoints.keep-best-by reward",
        )
    if rollout.eval.sets and rollout.eval.task_file:
        reason = "eval.sets is given, so eval.task_file would be ignored"
        yield (
            "eval.task_file",
            reason,
            f"add it to --eval.sets as NAME={rollout.eval.task_file}",
        )
    limit = rollout.first_concurrency
    if rollout.eval.samples_per_task > limit:
        reason = (
            f"all samples of a task run at the same time, but only {limit} rollouts may"
        )
        fix = "lower --eval.samples-per-task or raise --rollout-concurrency"
        yield "eval.samples_per_task", reason, fix


def _deadlines(config: Config) -> Contradictions:
    """Deadlines of waits for a rollout, which must exceed the rollout's own."""
    limit = config.rollout.rollout_timeout_s
    gateway = config.gateway
    buffer = config.buffer
    reason = f"a rollout may take rollout_timeout_s = {limit:g} s"
    if gateway.session.ttl_s < limit:
        yield (
            "session.ttl_s",
            reason,
            "raise --session.ttl-s or lower --rollout-timeout-s",
        )
    if gateway.late is not None and buffer.batch_timeout_s < gateway.late.deadline_s:
        why = f"the run waits at most batch_timeout_s = {buffer.batch_timeout_s:g} s for a batch"
        yield (
            "late.deadline_s",
            why,
            "lower --late.deadline-s or raise --batch-timeout-s",
        )
    if config.rollout.external_environments:
        yield from _external_deadlines(config)
    if buffer.batch_timeout_s < limit:
        yield (
            "buffer.batch_timeout_s",
            reason,
            "raise --batch-timeout-s or lower --rollout-timeout-s",
        )


def _external_deadlines(config: Config) -> Contradictions:
    """An external environment may die with the rollouts that it leased. They must
    become free, to be leased again, before the run gives up the batch that waits for
    them."""
    gateway = config.gateway
    batch_timeout_s = config.buffer.batch_timeout_s
    held_s = gateway.session.lease_timeout_s + gateway.session.ttl_s
    parts = "session.lease_timeout_s + session.ttl_s"
    if gateway.late is not None and gateway.late.expired == "accept":
        held_s += gateway.late.deadline_s
        parts += " + late.deadline_s"
    if held_s >= batch_timeout_s:
        reason = (
            f"an environment that hangs may hold a task for {parts} = {held_s:g} s, but the run waits at "
            f"most batch_timeout_s = {batch_timeout_s:g} s for a batch"
        )
        yield (
            "session.ttl_s",
            reason,
            "lower --session.ttl-s or raise --batch-timeout-s",
        )


def _determinism(config: Config) -> Contradictions:
    """Deterministic training on inputs that are not deterministic."""
    if not config.train.deterministic or config.run.debug_train_only:
        return
    rollout = config.rollout
    sglang = {name.replace("-", "_"): value for name, value in config.sglang.items()}
    needed = {
        "--engine.seeded-sampling": config.engine.seeded_sampling,
        "--engine.dtype float32": config.engine.dtype == "float32",
        "--num-engines 1": config.engine.num_engines == 1,
        "no --external-engines": not config.engine.external_engines,
        "--max-staleness 0": config.buffer.max_staleness == 0,
        "--rollout-concurrency 1": rollout.rollout_concurrency == 1,
        "--workers.count 1": rollout.workers.count == 1,
        "--sglang-max-running-requests 1": str(sglang.get("max_running_requests"))
        == "1",
        "--sglang-disable-radix-cache": bool(sglang.get("disable_radix_cache")),
        "--no-external-environments": not rollout.external_environments,
    }
    missing = [flag for flag, is_set in needed.items() if not is_set]
    if missing:
        reason = (
            "the sampled tokens or their log-probs would differ between two runs: they depend on what an "
            "engine computes at the same time and on the order in which rollouts end"
        )
        yield (
            "train.deterministic",
            reason,
            f"add {' '.join(missing)}; or leave --deterministic out",
        )


def _environment(config: Config) -> Contradictions:
    """An environment that the run starts, and that may not lease."""
    rollout = config.rollout
    if rollout.environment is not None and not rollout.external_environments:
        yield (
            "rollout.external_environments",
            "the environment that the run starts leases the tasks",
            "leave --no-external-environments out, or --environment",
        )


_ON_DATA = (
    _names,
    _choices,
    _modes,
    _data,
    _schedule,
    *ON_DATA,
    adapter,
    served_by_name,
    placement,
    *TRAINER,
)
_WITH_ROLLOUTS = (
    _names,
    _choices,
    _modes,
    _without_data,
    _schedule,
    _environment,
    _batch,
    _staleness,
    *WITH_ROLLOUTS,
    adapter,
    sent_adapter,
    served_by_name,
    _difficulty,
    *TRAINER,
    _evaluation,
    *ENGINES,
    _deadlines,
    _determinism,
    placement,
    *WEIGHTS,
)


def _secrets(config: Config) -> Contradictions:
    """Secrets in the resolved configuration, which is written into the run folder."""
    for table in ("sglang", "router", "megatron"):
        for name in getattr(config, table):
            if any(part in name for part in _SECRET_PARTS):
                reason = "invrl makes the keys of its private servers itself, new ones for each run"
                yield (
                    f"{table}.{name}",
                    reason,
                    f"leave --{table}-{name.replace('_', '-')} out",
                )
