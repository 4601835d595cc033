"""What single fields cannot know: contradictions between settings, found before any process starts.

One function per subject, each raising ConfigError with the fix. `check` is pure and is called by
`config.resolve`; what the settings name is looked at by `run_checks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.errors import ConfigError

if TYPE_CHECKING:
    from invrl.config import Config

_SECRET_PARTS = ("api_key", "password", "secret", "auth_token")
_MAX_COUNT = 2**31 - 1
_SEEDED_BACKENDS = {
    "attention_backend": ("torch_native", "fa3", "fa4", "flashinfer", "triton"),
    "sampling_backend": ("pytorch",),
}
"""Those in which SGLang can sample by seed; torch_native by `cpu_stand_ins`, on CPU."""


def check(config: Config) -> None:
    """Raises ConfigError at the first contradiction."""
    _check_modes(config)
    _check_schedule(config)
    _check_batch(config)
    _check_evaluation(config)
    _check_sampling(config)
    _check_engines(config)
    _check_deadlines(config)
    _check_upstream_names(config)
    _check_sizes(config)


def _check_modes(config: Config) -> None:
    run = config.run
    if run.debug_rollout_only and run.debug_train_only:
        raise ConfigError(
            field="run.debug_train_only",
            value=True,
            reason="a run cannot be without the trainer and without the rollout half",
            fix="give one of --debug-rollout-only and --debug-train-only",
        )
    if run.debug_train_only and not run.load_rollout_data:
        raise ConfigError(
            field="run.load_rollout_data",
            value="",
            reason="--debug-train-only trains on saved batches",
            fix="give --load-rollout-data RUN/rollout_data",
        )
    for name in ("load_rollout_data", "load_checkpoint"):
        if getattr(run, name) and not run.debug_train_only:
            raise ConfigError(
                field=f"run.{name}",
                value=getattr(run, name),
                reason="only --debug-train-only reads it",
                fix="add --debug-train-only, or leave it out",
            )


def _check_schedule(config: Config) -> None:
    train = config.train
    if train.lr_decay_style != "constant" and train.lr_decay_steps <= train.lr_warmup_steps:
        raise ConfigError(
            field="train.lr_decay_steps",
            value=train.lr_decay_steps,
            reason=f"a {train.lr_decay_style} decay ends after its warm-up of {train.lr_warmup_steps} steps",
            fix="set --lr-decay-steps to the optimizer steps of the run",
        )
    if train.lr_min > train.lr:
        raise ConfigError(
            field="train.lr_min",
            value=train.lr_min,
            reason=f"the schedule's highest rate is lr = {train.lr}",
            fix="lower --lr-min or raise --lr",
        )


def _check_batch(config: Config) -> None:
    groups, samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    ranks, steps = config.train.data_parallel_size, config.algorithm.steps_per_batch
    if groups * samples < ranks:
        raise ConfigError(
            field="train.data_parallel_size",
            value=ranks,
            reason=f"a batch has {groups} x {samples} = {groups * samples} rollouts, fewer than ranks",
            fix="lower --data-parallel-size or raise --rollout-batch-size",
        )
    if steps > groups:
        raise ConfigError(
            field="algorithm.steps_per_batch",
            value=steps,
            reason=f"a mini-batch is made of whole groups, and a batch has {groups}",
            fix="lower --steps-per-batch or raise --rollout-batch-size",
        )
    if samples == 1 and config.algorithm.advantage in ("grpo", "dr_grpo"):
        raise ConfigError(
            field="rollout.n_samples_per_prompt",
            value=samples,
            reason=f"{config.algorithm.advantage} compares the rollouts of a group; with one, every "
            "advantage is 0",
            fix="set --n-samples-per-prompt to 2 or more",
        )


def _check_evaluation(config: Config) -> None:
    if config.rollout.eval_interval and not config.rollout.eval_tasks:
        raise ConfigError(
            field="rollout.eval_interval",
            value=config.rollout.eval_interval,
            reason="there are no held-out tasks to evaluate on (eval_tasks is 0)",
            fix="set --eval-tasks, or --eval-interval 0",
        )
    if config.rollout.eval_sets and config.rollout.eval_task_file:
        raise ConfigError(
            field="rollout.eval_task_file",
            value=config.rollout.eval_task_file,
            reason="held-out sets are named in eval_sets, which leaves this one out",
            fix=f"add it to --eval-sets as NAME={config.rollout.eval_task_file}",
        )
    if config.rollout.eval_samples_per_task > config.rollout.rollout_concurrency:
        raise ConfigError(
            field="rollout.eval_samples_per_task",
            value=config.rollout.eval_samples_per_task,
            reason=f"a task's samples run together, and {config.rollout.rollout_concurrency} rollouts may",
            fix="lower --eval-samples-per-task or raise --rollout-concurrency",
        )


def _check_sampling(config: Config) -> None:
    if config.rollout.max_new_tokens >= config.engine.engine_max_total_tokens:
        raise ConfigError(
            field="rollout.max_new_tokens",
            value=config.rollout.max_new_tokens,
            reason=f"an engine's KV cache holds {config.engine.engine_max_total_tokens} tokens in all",
            fix="lower --max-new-tokens or raise --engine-max-total-tokens",
        )


def _check_engines(config: Config) -> None:
    if config.rollout.rollout_concurrency > config.gateway.max_open_sessions:
        raise ConfigError(
            field="rollout.rollout_concurrency",
            value=config.rollout.rollout_concurrency,
            reason=f"the gateway admits {config.gateway.max_open_sessions} open sessions",
            fix="lower --rollout-concurrency or raise --max-open-sessions",
        )
    if config.rollout.rollout_workers > config.rollout.rollout_concurrency:
        raise ConfigError(
            field="rollout.rollout_workers",
            value=config.rollout.rollout_workers,
            reason=f"only {config.rollout.rollout_concurrency} rollouts run at a time",
            fix="lower --rollout-workers or raise --rollout-concurrency",
        )
    for name, value in config.sglang.items() if config.engine.seeded_sampling else ():
        seeded = _SEEDED_BACKENDS.get(name.replace("-", "_"), (value,))
        if value not in seeded:
            raise ConfigError(
                field=f"sglang.{name}",
                value=value,
                reason="SGLang cannot sample by seed with it, and seeded_sampling is on",
                fix=f"use one of: {', '.join(map(str, seeded))}; or --no-seeded-sampling",
            )
    if config.gateway.gateway_port > 65535:
        raise ConfigError(
            field="gateway.gateway_port",
            value=config.gateway.gateway_port,
            reason="ports end at 65535",
            fix="choose a port up to 65535, or 0 for a free one",
        )


def _check_deadlines(config: Config) -> None:
    """What waits for a rollout must wait longer than a rollout may take."""
    limit = config.rollout.rollout_timeout_s
    for field, value in (
        ("gateway.session_ttl_s", config.gateway.session_ttl_s),
        ("buffer.batch_timeout_s", config.buffer.batch_timeout_s),
    ):
        if value < limit:
            raise ConfigError(
                field=field,
                value=value,
                reason=f"a rollout may take rollout_timeout_s = {limit:g} s",
                fix=f"raise --{field.partition('.')[2].replace('_', '-')} or lower --rollout-timeout-s",
            )


def _check_upstream_names(config: Config) -> None:
    """The resolved configuration is written down, so it must hold no secret."""
    tables = {"sglang": config.sglang, "router": config.router, "megatron": config.megatron}
    for table, options in tables.items():
        for name in options:
            if any(part in name for part in _SECRET_PARTS):
                raise ConfigError(
                    field=f"{table}.{name}",
                    value="(not shown)",
                    reason="invrl makes the keys of its private servers itself, anew for each run",
                    fix=f"leave --{table}-{name.replace('_', '-')} out",
                )


def _check_sizes(config: Config) -> None:
    """Counts travel as int32 (token ids, positions, versions)."""
    for table in type(config).model_fields:
        section = getattr(config, table)
        for name, value in section if not isinstance(section, dict) else section.items():
            if isinstance(value, int) and abs(value) > _MAX_COUNT:
                raise ConfigError(
                    field=f"{table}.{name}",
                    value=value,
                    reason="over 2^31 - 1",
                    fix="choose a smaller number",
                )
