"""Settings of earlier versions: their names, and the values that meant absence.

The configuration of a recorded run keeps the meaning that it had when it was written.
Elsewhere an old name is refused with the new one. Pure data and functions.
"""

from collections.abc import Mapping
from typing import Any

from invrl.user_code.plugins import plugin_name
from invrl.weights.config import WeightsConfig

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
_OF_OTHER_PACKAGES = {"sglang", "router", "megatron"}
_ABSENT: dict[object, tuple[str, ...]] = {
    "": (
        "run_name",
        "load_rollout_data",
        "load_checkpoint",
        "otel_endpoint",
        "wandb_project",
        "mlflow_tracking_uri",
        "model_path",
        "reference_model_path",
        "teacher_model_path",
        "teacher_url",
        "critic_model_path",
        "data_path",
        "data_eval_path",
        "rollout_function_path",
        "reward_function_path",
        "task_source_path",
        "task_file",
        "eval_task_file",
        "smg_environment",
        "gateway_public_url",
        "chat_template_path",
        "algorithm_preset",
        "weight_folder",
        "weight_host",
    ),
    0: (
        "save_interval",
        "save_interval_s",
        "keep_checkpoints",
        "keep_best",
        "sample_interval_s",
        "log_samples",
        "metrics_port",
        "wandb_rollouts",
        "data_eval_fraction",
        "data_epochs",
        "curriculum_tasks",
        "rollout_worker_memory_gb",
        "rollout_top_logprobs",
        "eval_interval",
        "eval_tasks",
        "engine_max_total_tokens",
        "session_idle_timeout_s",
        "reward_deadline_s",
        "gateway_port",
        "max_filtered_batches",
        "max_identical_failures",
        "max_failures_at_start",
        "overlong_buffer",
        "overlong_length",
        "gae_length_alpha",
        "value_clip",
        "dual_clip",
        "correction_floor",
        "rejection_low",
        "rejection_high",
        "router_shift_floor",
        "aggregation_constant",
        "kl_coef",
        "kl_clamp",
        "kl_target",
        "reference_reset_steps",
        "reference_ema",
        "solved_nll_coef",
        "entropy_target",
        "entropy_ceiling",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "lr_decay_steps",
        "clip_grad",
        "critic_clip_grad",
        "critic_data_parallel_size",
        "moe_router_bias_update_rate",
        "max_row_tokens",
    ),
    "none": (
        "curriculum",
        "rejection",
        "length_weighting",
    ),
}
"""Settings by the value that meant "none" before they could be absent."""


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


def as_written_now(
    tables: Mapping[str, Mapping[str, Any]], section_of_table: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the configuration of a recorded run with today's names, and `false` for
    what was absent. `section_of_table`: today's optional tables."""
    now = {table: dict(entries) for table, entries in tables.items()}
    for section in set(now) - _OF_OTHER_PACKAGES:
        entries = now[section]
        for value, names in _ABSENT.items():
            for name in entries.keys() & names:
                if entries[name] is not False and entries[name] == value:
                    entries[name] = False
    if "algorithm" in now and "adaptations" not in now["algorithm"]:
        _name_plugins(now)
    is_without_tables = "kl_coef" in now.get("algorithm", {})
    if is_without_tables:
        _begin_tables(now)
    _move_settings(now, section_of_table)
    if is_without_tables:
        _drop_tables(now, section_of_table)
    return now


def _name_plugins(tables: dict[str, dict[str, Any]]) -> None:
    """Name the user code that was built in, with its settings in tables."""
    algorithm = tables["algorithm"]
    is_weighted = "length_weights" in tables or algorithm.get("length_weighting")
    dppo = {**tables.get("dppo", {})}
    if "dppo_threshold" in algorithm:
        dppo["threshold"] = algorithm["dppo_threshold"]
    plugin: dict[str, dict[str, Any]] = {}
    for section in list(tables):
        for key in list(tables[section]):
            new = FORMER_NAMES.get(f"{section}.{key}") or FORMER_NAMES.get(key, "")
            if new.startswith("plugin."):
                value = tables[section].pop(key)
                _, name, new_key = f"{new}.".split(".")[:3]
                if new_key and value is not False:
                    plugin.setdefault(name, {})[new_key] = value
    tables.pop("length_weights", None)
    tables.pop("simko", None)
    for setting, values in FORMER_VALUES.items():
        value = algorithm.get(setting)
        if value in values:
            algorithm[setting] = values[value]
        if value in ("dppo_tv_topk", "dppo_kl_topk"):
            plugin[plugin_name(values[value])] = dppo
            tables.pop("dppo", None)
            algorithm.pop("dppo_threshold", None)
    entropy = plugin.get("AdaptiveEntropy", {})
    lr = plugin.get("LearnedExponent", {}).get("lr")
    exponent = plugin.get("LengthWeight", {}).get("exponent")
    is_on = {
        "RouterShift": "RouterShift" in plugin,
        "LengthWeight": bool(is_weighted and (lr or exponent)),
        "LearnedExponent": bool(is_weighted and lr),
        "AdaptiveKL": "AdaptiveKL" in plugin,
        "AdaptiveEntropy": bool({"target", "ceiling"} & entropy.keys()),
    }
    adaptations: list[str] = []
    for name, is_used in is_on.items():
        setting, path = _NAMED_BY[name]
        if setting != "adaptations":
            algorithm[setting] = is_used and path
        elif is_used:
            adaptations.append(path)
    algorithm["adaptations"] = adaptations
    named = {plugin_name(str(algorithm.get(setting))) for setting in FORMER_VALUES}
    tables["plugin"] = {
        name: table for name, table in plugin.items() if is_on.get(name, name in named)
    }


def _move_settings(
    tables: dict[str, dict[str, Any]], section_of_table: Mapping[str, str]
) -> None:
    """Move settings to the tables and names that they have now, and leave out those
    that are gone. Those of an optional table stay in it: it has never had the settings
    of another."""
    for section in set(tables) - _OF_OTHER_PACKAGES:
        for old in tables[section].keys() & REMOVED_SETTINGS:
            del tables[section][old]
        for old in list(tables[section]):
            new = FORMER_NAMES.get(old)
            if new is None:
                continue
            table, _, key = new.rpartition(".")
            if section in section_of_table and table != section:
                continue
            tables.setdefault(table or section, {})[key] = tables[section].pop(old)
    if not tables.get("late", {}).get("deadline_s"):
        tables.pop("late", None)
    if "weight_sync" in tables:  # it had the settings of all transports
        del tables["weight_sync"]
        weights = tables.get("weights", {})
        kind = WeightsConfig.kinds[weights.get("transport", "arena")]
        for key in set(weights) - set(kind.model_fields):
            del weights[key]


_CRITIC: dict[str, object] = {
    "model_path": False,
    "lr": 1e-5,
    "lr_warmup_steps": 0,
    "clip_grad": 1.0,
    "warmup_steps": 0,
    "data_parallel_size": False,
    "value_clip": 0.2,
}
"""Former defaults of a critic."""
_ANCHORS = {
    "kl": ("coefficient",),
    "entropy": ("coefficient",),
    "overlong": ("buffer",),
    "rejection": ("kind",),
    "curriculum": ("kind",),
    "teacher": ("model_path", "url"),
    "wandb": ("project",),
}
"""Settings without which a feature was off, by its table."""


def _begin_tables(tables: dict[str, dict[str, Any]]) -> None:
    """Begin the tables whose kind, or whose objective, another setting named."""
    for section, table in (("algorithm", "rejection"), ("rollout", "curriculum")):
        kind = tables.get(section, {}).pop(table, None)
        if isinstance(kind, str):
            tables[table] = {"kind": kind}
    algorithm = tables["algorithm"]
    beta = algorithm.pop("preference_beta", 0.1)
    smoothing = algorithm.pop("label_smoothing", 0.0)
    objective = algorithm.get("objective")
    if objective in ("dpo", "ipo", "kto"):
        tables[objective] = {"beta": beta}
    if objective in ("dpo", "simpo"):
        tables.setdefault(objective, {})["label_smoothing"] = smoothing


def _drop_tables(
    tables: dict[str, dict[str, Any]], section_of_table: Mapping[str, str]
) -> None:
    """Drop the tables of features that were off."""
    algorithm = tables["algorithm"]
    critic = tables.get("critic", {})
    objective = str(algorithm.get("objective"))
    policy_loss = str(algorithm.get("policy_loss"))
    group_filter = tables.get("buffer", {}).get("group_filter")
    is_on = {
        # an objective of the user's own may read values with any advantage
        "critic": algorithm.get("advantage") == "gae"
        or (
            ":" in objective
            and any(critic.get(key, value) != value for key, value in _CRITIC.items())
        ),
        "difficulty": group_filter == "medium_difficulty",
        "dppo": policy_loss in ("dppo_tv", "dppo_kl", "dppo"),
    }
    for table, anchors in _ANCHORS.items():
        entries = tables.get(table, {})
        is_on[table] = any(entries.get(anchor) for anchor in anchors)
    for table in ("dpo", "ipo", "simpo", "orpo", "kto"):
        is_on[table] = objective == table
    for table in ("sapo", "rejection_gate", "vespo"):
        is_on[table] = policy_loss == table
    for table, section in section_of_table.items():
        if not is_on.get(table, table in tables):
            tables.pop(table, None)
            if section in tables:
                tables[section][table] = False
