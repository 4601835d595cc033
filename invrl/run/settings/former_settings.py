"""Settings of earlier versions: an old name or value is refused with the new one."""

FORMER_NAMES: dict[str, str] = {
    "steps_per_batch": "num_mini_batches",
    "num_minibatches": "num_mini_batches",
    "max_tokens_per_microbatch": "max_tokens_per_micro_batch",
    "max_row_tokens": "max_sample_tokens",
    "weight_carrier": "weights.transport",
    "kl_coef": "kl.coefficient",
    "kl_estimator": "kl.estimator",
    "kl_in": "kl.added_to",
    "kl_clamp": "kl.clamp",
    "kl_target": "plugin.AdaptiveKL.target",
    "entropy_coef": "entropy.coefficient",
    "entropy_target": "plugin.AdaptiveEntropy.target",
    "entropy_ceiling": "plugin.AdaptiveEntropy.ceiling",
    "entropy_coef_step": "plugin.AdaptiveEntropy.step",
    "rejection_low": "rejection.low",
    "rejection_high": "rejection.high",
    "overlong_buffer": "overlong.buffer",
    "overlong_penalty": "overlong.penalty",
    "overlong_length": "overlong.length",
    "length_lambda": "plugin.LengthWeight.exponent",
    "length_lambda_lr": "plugin.LearnedExponent.lr",
    "length_lambda_scale": "plugin.LengthWeight.scale",
    "length_weighting": "plugin.LengthWeight",
    "preference_beta": "dpo.beta",
    "label_smoothing": "dpo.label_smoothing",
    "simpo_beta": "simpo.beta",
    "simpo_gamma": "simpo.gamma",
    "orpo_lambda": "orpo.weight",
    "kto_desirable_weight": "kto.desirable_weight",
    "kto_undesirable_weight": "kto.undesirable_weight",
    "sapo_temperature_positive": "sapo.temperature_positive",
    "sapo_temperature_negative": "sapo.temperature_negative",
    "rejection_gate_sharpness": "rejection_gate.sharpness",
    "dppo_threshold": "dppo.threshold",
    "simko_alpha": "plugin.SimKO.alpha",
    "simko_top1_weight": "plugin.SimKO.top1_weight",
    "simko_entropy_quantile": "plugin.SimKO.entropy_quantile",
    "vespo_power_positive": "vespo.power_positive",
    "vespo_decay_positive": "vespo.decay_positive",
    "vespo_power_negative": "vespo.power_negative",
    "vespo_decay_negative": "vespo.decay_negative",
    "critic_model_path": "critic.model_path",
    "critic_lr": "critic.lr",
    "critic_lr_warmup_steps": "critic.lr_warmup_steps",
    "critic_clip_grad": "critic.clip_grad",
    "critic_warmup_steps": "critic.warmup_steps",
    "critic_data_parallel_size": "critic.data_parallel_size",
    "gae_lambda": "critic.gae_lambda",
    "critic_gae_lambda": "critic.returns_lambda",
    "gae_length_alpha": "critic.length_alpha",
    "value_targets": "critic.targets",
    "vtrace_rho_cap": "critic.vtrace_rho_cap",
    "vtrace_c_cap": "critic.vtrace_c_cap",
    "value_clip": "critic.value_clip",
    "teacher_model_path": "teacher.model_path",
    "teacher_url": "teacher.url",
    "teacher_timeout_s": "teacher.timeout_s",
    "teacher_concurrency": "teacher.concurrency",
    "curriculum_tasks": "curriculum.tasks",
    "curriculum_decay": "curriculum.decay",
    "difficulty_low": "difficulty.low",
    "difficulty_high": "difficulty.high",
    "difficulty_groups": "difficulty.groups",
    "wandb_project": "wandb.project",
    "wandb_mode": "wandb.mode",
    "wandb_rollouts": "wandb.rollouts",
    "save_interval_s": "checkpoints.interval_s",
    "async_checkpoints": "checkpoints.background",
    "keep_checkpoints": "checkpoints.keep",
    "keep_best": "checkpoints.keep_best",
    "keep_best_by": "checkpoints.keep_best_by",
    "log_format": "log.format",
    "log_level": "log.level",
    "log_samples": "log.samples",
    "progress": "log.progress",
    "otel_endpoint": "log.otel_endpoint",
    "tensorboard": "metrics.tensorboard",
    "metrics_port": "metrics.port",
    "metrics_host": "metrics.host",
    "mlflow_tracking_uri": "metrics.mlflow_tracking_uri",
    "sample_interval_s": "metrics.sample_interval_s",
    "eval_interval": "eval.interval",
    "eval_tasks": "eval.tasks",
    "eval_samples_per_task": "eval.samples_per_task",
    "eval_sets": "eval.sets",
    "eval_modes": "eval.modes",
    "eval_task_file": "eval.task_file",
    "max_open_sessions": "session.max_open",
    "session_ttl_s": "session.ttl_s",
    "session_idle_timeout_s": "session.idle_timeout_s",
    "session_max_turns": "session.max_turns",
    "session_max_tokens": "session.max_tokens",
    "session_max_calls": "session.max_calls",
    "extra_columns": "session.extra_columns",
    "train_auxiliary_roots": "session.train_auxiliary_roots",
    "end_grace_s": "session.end_grace_s",
    "lease_timeout_s": "session.lease_timeout_s",
    "generate_timeout_s": "session.generate_timeout_s",
    "reward_deadline_s": "late.deadline_s",
    "late_reward": "late.expired",
    "gateway_host": "gateway.host",
    "gateway_port": "gateway.port",
    "gateway_workers": "gateway.workers",
    "gateway_cors_origins": "gateway.cors_origins",
    "gateway_public_url": "gateway.public_url",
    "constrained": "gateway.constrained",
    "match_level": "gateway.match_level",
    "engine_tp_size": "engine.tp_size",
    "engine_dtype": "engine.dtype",
    "engine_max_total_tokens": "engine.max_total_tokens",
    "engine_start_timeout_s": "engine.start_timeout_s",
    "engine_health_interval_s": "engine.health_interval_s",
    "engine_max_restarts": "engine.max_restarts",
    "router_start_timeout_s": "engine.router_start_timeout_s",
    "smg_environment": "engine.smg_environment",
    "data_eval_path": "data.eval_path",
    "data_eval_fraction": "data.eval_fraction",
    "data_kind": "data.kind",
    "data_batch_size": "data.batch_size",
    "data_epochs": "data.epochs",
    "data_shuffle": "data.shuffle",
    "data_overlong": "data.overlong",
    "weight_transport": "weights.transport",
    "weight_folder": "weights.folder",
    "weight_host": "weights.host",
    "weight_full_every": "weights.full_every",
    "weight_update": "weights.update",
    "weight_update_inflight": "weights.inflight",
    "weight_drain_timeout_s": "weights.drain_timeout_s",
    "weight_arena": "weights.arena_mode",
    "weight_arena_device": "weights.arena_device",
    "weight_sync_timeout_s": "weights.timeout_s",
    "weight_readback_every": "weights.readback_every",
    "failure_reward": "failures.reward",
    "max_identical_failures": "failures.max_identical",
    "max_failures_at_start": "failures.max_at_start",
    "turn_reward_baseline": "turn_rewards.baseline",
    "turn_reward_use": "turn_rewards.use",
    "rollout_workers": "workers.count",
    "rollout_worker_memory_gb": "workers.memory_gb",
    "kl.target": "plugin.AdaptiveKL.target",
    "entropy.target": "plugin.AdaptiveEntropy.target",
    "entropy.ceiling": "plugin.AdaptiveEntropy.ceiling",
    "entropy.step": "plugin.AdaptiveEntropy.step",
    "length_weights": "plugin.LengthWeight",
    "length_weights.exponent": "plugin.LengthWeight.exponent",
    "length_weights.lr": "plugin.LearnedExponent.lr",
    "length_weights.scale": "plugin.LengthWeight.scale",
    "router_shift_floor": "plugin.RouterShift.floor",
    "simko": "plugin.SimKO",
    "simko.alpha": "plugin.SimKO.alpha",
    "simko.top1_weight": "plugin.SimKO.top1_weight",
    "simko.entropy_quantile": "plugin.SimKO.entropy_quantile",
    "reference_reset_steps": "reference.reset_steps",
    "reference_reset_optimizer": "reference.reset_optimizer",
    "reference_ema": "reference.ema",
    "advantage_eps": "advantage_std.eps",
    "advantage_std_floor": "advantage_std.floor",
    "reward_deviation": "advantage_std.estimator",
    "seeded_sampling": "engine.seeded_sampling",
    "special_tokens_in_content": "gateway.special_tokens_in_content",
}
"""The name of a setting by the one that it had; one that has its table
before it as table.key."""
REMOVED_SETTINGS: dict[str, str] = {
    "ray_start_attempts": "a run starts its Ray up to four times",
}
"""What a run does instead of reading a setting that is gone, by the setting's name."""
FORMER_VALUES: dict[str, dict[str, str]] = {
    "policy_loss": {
        "simko": "invrl.contrib.simko:SimKO",
        "dppo_tv_topk": "invrl.contrib.dppo_topk:DPPOTotalVariation",
        "dppo_kl_topk": "invrl.contrib.dppo_topk:DPPODivergence",
    },
    "old_logprobs": {"interpolated": "invrl.contrib.a3po:Interpolated"},
}
"""The value of a setting by the one that it had."""
_NAMED_BY = {
    "SimKO": ("policy_loss", "invrl.contrib.simko:SimKO"),
    "RouterShift": ("ratio_weight", "invrl.contrib.router_shift:RouterShift"),
    "LengthWeight": ("sample_weight", "invrl.contrib.lambda_grpo:LengthWeight"),
    "LearnedExponent": ("adaptations", "invrl.contrib.lambda_grpo:LearnedExponent"),
    "AdaptiveKL": ("adaptations", "invrl.contrib.adaptive_kl:AdaptiveKL"),
    "AdaptiveEntropy": (
        "adaptations",
        "invrl.contrib.adaptive_entropy:AdaptiveEntropy",
    ),
}
"""The setting and the value that load what was built in."""


def former_fix(name: str) -> str:
    """Describe the current place of a former setting, or what a run does without it; ""
    for any other name."""
    if name == "weight_sync":
        return "it was renamed: write [weights]"
    old = name.lower().removeprefix("--").replace("-", "_")
    if old in REMOVED_SETTINGS:
        return f"leave it out: {REMOVED_SETTINGS[old]}"
    new = FORMER_NAMES.get(old)
    if new is None:
        return ""
    is_flag = name.startswith("--")
    if new.startswith("plugin."):
        plugin, _, key = new.removeprefix("plugin.").partition(".")
        setting, path = _NAMED_BY[plugin]
        if is_flag:
            fix = f"it moved: write --{setting.replace('_', '-')} {path}"
            return fix + (f" --{new.replace('_', '-')}" if key else "")
        fix = f"it moved: write {setting} = {path!r}, in table [algorithm]"
        return fix + (f", and {key}, in table [plugin.{plugin}]" if key else "")
    if is_flag:
        return f"it was renamed: write --{new.replace('_', '-')}"
    table, _, key = new.rpartition(".")
    place = f", in table [{table}]" if table else ""
    return f"it was renamed: write {key}{place}"
