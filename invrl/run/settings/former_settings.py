"""Settings of earlier versions: an old name or value is refused with the new one."""

FORMER_NAMES: dict[str, str] = {
    "steps_per_batch": "num_mini_batches",
    "num_minibatches": "num_mini_batches",
    "max_tokens_per_microbatch": "max_tokens_per_micro_batch",
    "max_row_tokens": "max_sample_tokens",
    "weight_carrier": "weights.transport",
    "kl_coef": "kl.coefficient",
    "kl_in": "kl.added_to",
    "kl_target": "plugin.AdaptiveKL.target",
    "entropy_coef": "entropy.coefficient",
    "entropy_target": "plugin.AdaptiveEntropy.target",
    "entropy_ceiling": "plugin.AdaptiveEntropy.ceiling",
    "entropy_coef_step": "plugin.AdaptiveEntropy.step",
    "length_lambda": "plugin.LengthWeight.exponent",
    "length_lambda_lr": "plugin.LearnedExponent.lr",
    "length_lambda_scale": "plugin.LengthWeight.scale",
    "length_weighting": "plugin.LengthWeight",
    "preference_beta": "dpo.beta",
    "label_smoothing": "dpo.label_smoothing",
    "orpo_lambda": "orpo.weight",
    "simko_alpha": "plugin.SimKO.alpha",
    "simko_top1_weight": "plugin.SimKO.top1_weight",
    "simko_entropy_quantile": "plugin.SimKO.entropy_quantile",
    "critic_gae_lambda": "critic.returns_lambda",
    "gae_length_alpha": "critic.length_alpha",
    "value_targets": "critic.targets",
    "save_interval_s": "checkpoints.interval_s",
    "async_checkpoints": "checkpoints.background",
    "keep_checkpoints": "checkpoints.keep",
    "max_open_sessions": "session.max_open",
    "reward_deadline_s": "late.deadline_s",
    "late_reward": "late.expired",
    "router_start_timeout_s": "engine.router_start_timeout_s",
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
    "advantage_eps": "advantage_std.eps",
    "reward_deviation": "advantage_std.estimator",
}
"""The name of a setting by the one that it had; one that has its table
before it as table.key. Left out are names that differ only in their table:
`critic_lr` is critic.lr, and `keep_best` checkpoints.keep_best."""
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
