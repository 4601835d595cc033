"""Suggests the setting that a wrong name stands for: by its spelling, or by what other trainers call it.
Pure."""

import difflib
from collections.abc import Iterable

_FOREIGN_NAMES: dict[str, str] = {
    "model_path": "model model_name model_id model_name_or_path base_model pretrain pretrained hf_checkpoint",
    "task_file": (
        "dataset datasets dataset_name dataset_path data data_file train_data train_file"
        " train_files prompt_data prompts tasks"
    ),
    "eval_task_file": "eval_dataset eval_data eval_file val_data val_file val_files test_data test_file",
    "eval_sets": "eval_datasets eval_prompt_data",
    "rollout_function_path": "agent agent_path env environment rollout rollout_fn rollout_function workflow",
    "reward_function_path": (
        "reward reward_fn reward_func reward_funcs reward_function reward_path custom_rm_path"
    ),
    "lr": "learning_rate actor_lr step_size",
    "critic_lr": "value_lr lr_critic critic_learning_rate vf_lr",
    "critic_data_parallel_size": "critic_num_gpus critic_num_gpus_per_node critic_ranks critic_dp_size",
    "critic_warmup_steps": "critic_warmup value_pretrain_steps num_critic_only_steps",
    "critic_model_path": "critic_model value_model value_model_path critic_path critic_pretrain critic_load",
    "value_clip": "cliprange_value value_clip_range vf_clip eps_clip_value",
    "gae_lambda": "lam lambd lambda gae_lam",
    "discount": "gamma",
    "lr_warmup_steps": "warmup warmup_steps num_warmup_steps warmup_ratio",
    "lr_decay_style": "lr_scheduler lr_scheduler_type scheduler",
    "clip_grad": "max_grad_norm grad_clip gradient_clipping grad_norm_clip",
    "rollout_batch_size": (
        "batch_size train_batch_size global_batch_size per_device_train_batch_size prompts_per_step"
        " groups_per_batch"
    ),
    "n_samples_per_prompt": (
        "n num_generations num_samples n_samples group_size num_return_sequences samples_per_prompt"
        " rollouts_per_example"
    ),
    "num_minibatches": (
        "mini_batch_size ppo_mini_batch_size num_mini_batches num_iterations ppo_epochs updates_per_batch"
    ),
    "max_tokens_per_microbatch": (
        "micro_batch_size per_device_batch_size gradient_accumulation_steps max_tokens_per_gpu"
    ),
    "max_row_tokens": "max_seq_length_train max_row_length train_max_length max_sequence_length cutoff_len",
    "num_steps": (
        "epochs num_epochs num_train_epochs total_epochs max_steps steps total_steps train_steps"
        " total_training_steps num_rollout iterations"
    ),
    "max_new_tokens": (
        "max_tokens max_completion_length max_completion_tokens max_response_length max_response_len"
        " max_output_tokens max_length generate_max_len"
    ),
    "engine_max_total_tokens": "context_length max_context_length max_model_len max_seq_len max_seq_length",
    "temperature": "temp sampling_temperature rollout_temperature",
    "algorithm_preset": "algorithm algo preset trainer",
    "advantage": "advantage_estimator adv_estimator",
    "policy_loss": "loss loss_fn loss_type loss_function",
    "aggregation": "loss_agg_mode loss_aggregation",
    "kl_coef": "beta kl kl_beta kl_coeff kl_loss_coef init_kl_coef kl_weight",
    "eps_clip_low": "epsilon clip_range cliprange clip_eps clip_ratio eps_clip epsilon_low",
    "eps_clip_high": "epsilon_high clip_ratio_high clip_higher",
    "max_staleness": "off_policy off_policy_steps max_off_policy_steps async_level staleness",
    "num_engines": "num_gpus n_gpus gpus tensor_parallel_size num_replicas replicas",
    "data_parallel_size": "world_size dp_size nproc_per_node num_processes",
    "tensor_model_parallel_size": "tp tp_size train_tp",
    "context_parallel_size": "cp cp_size sequence_parallel_size ulysses_sequence_parallel_size",
    "expert_model_parallel_size": "ep ep_size train_ep expert_parallel_size",
    "pipeline_model_parallel_size": "pp pp_size train_pp",
    "routing_replay": "router_replay r2 r3 use_routing_replay use_rollout_routing_replay",
    "router_shift_floor": "router_shift router_shift_gamma_min gamma_min rspo_gamma_min",
    "reference_model_path": "ref_model ref_model_path ref_model_name reference_model ref_load sft_model_path",
    "teacher_model_path": "teacher teacher_model teacher_model_name teacher_model_name_or_path teacher_path",
    "teacher_url": "teacher_server teacher_model_server_url teacher_base_url teacher_address",
    "reference_placement": "ref_offload ref_param_offload offload_ref ref_cpu_offload",
    "train_dtype": "dtype bf16 fp16 precision mixed_precision",
    "run_name": "name exp_name experiment experiment_name run_id",
    "run_root": "output output_dir out_dir save_dir log_dir logdir default_root_dir ckpt_dir checkpoint_dir",
    "save_interval": "save_steps save_freq save_every checkpoint_interval ckpt_interval",
    "keep_checkpoints": "save_total_limit max_ckpt_num max_checkpoints",
    "max_shard_gb": "max_shard_size shard_size",
    "keep_best": "load_best_model_at_end save_best save_top_k",
    "keep_best_by": "metric_for_best_model best_metric monitor",
    "eval_interval": "eval_steps eval_freq eval_every test_freq val_interval",
    "eval_tasks": "eval_size num_eval eval_batch_size num_eval_examples",
    "rollout_concurrency": "concurrency max_concurrency max_concurrent num_workers parallelism",
    "rollout_timeout_s": "timeout rollout_timeout",
    "gateway_port": "port",
    "gateway_host": "host address",
    "wandb_project": "wandb report_to use_wandb wandb_name project project_name",
    "mlflow_tracking_uri": "mlflow tracking_uri",
    "chat_template_path": "chat_template template",
    "seed": "random_seed rng_seed",
    "max_restarts": "retries max_retries auto_resume",
}
"""By setting of ours: the names that well-known trainers use for it, or for a setting of that purpose."""
RENAMED = {"steps_per_batch": "num_minibatches", "weight_carrier": "weight_transport"}
"""Settings that had another name in an earlier version, by that name."""
_OURS = {foreign: ours for ours, names in _FOREIGN_NAMES.items() for foreign in names.split()}
_SHORTEST_WORD = 5
"""Letters of a word that counts: "max", "num" and "path" are part of too many names."""
_MOST_SHOWN = 3


def nearest(name: str, names: Iterable[str], many: str = "see --help for the valid names") -> str:
    """A fix for a wrong name: the closest valid name. If none is close, the list of all; if there are too
    many for a list, `many`."""
    valid = sorted(names)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    if len(valid) > 30:
        return many
    return f"use one of: {', '.join(valid)}"


def nearest_setting(name: str, names: Iterable[str]) -> str:
    """The settings, or flags, that a wrong name may stand for, as a fix."""
    valid = {_plain(valid_name): valid_name for valid_name in names}
    new_name = RENAMED.get(_plain(name))
    if new_name in valid:
        return f"it was renamed: write {valid[new_name]}"
    near = near_settings(name, valid.values())
    if not near:
        return "see --help for the valid names"
    return f"did you mean {' or '.join(near)}?"


def meant_setting(name: str) -> str:
    """What the setting of that name is called here; "" if no trainer is known to have one."""
    return _OURS.get(_plain(name), "")


def near_settings(name: str, names: Iterable[str]) -> list[str]:
    """The valid `names` that a wrong name may stand for. The first of these rules that finds any decides:
    what other trainers call by it; the one that is spelt almost like it; those that share words with it;
    the one that is spelt most like it. Empty if nothing is near."""
    valid = {_plain(valid_name): valid_name for valid_name in names}
    wanted = _plain(name)
    meant = _OURS.get(wanted) or _meant_by_misspelt(wanted, valid)
    if meant in valid:
        return [valid[meant]]
    near = (
        difflib.get_close_matches(wanted, list(valid), n=1, cutoff=0.75)
        or _sharing_words(wanted, valid)
        or difflib.get_close_matches(wanted, list(valid), n=1, cutoff=0.6)
    )
    return [valid[plain] for plain in near]


def _sharing_words(wanted: str, valid: Iterable[str]) -> list[str]:
    """The names that share most words with it, the most similar first."""
    words = {word for word in wanted.split("_") if len(word) >= _SHORTEST_WORD}
    shared = {plain: len(words & set(plain.split("_"))) for plain in valid}
    most = max(shared.values(), default=0)
    best = [plain for plain, count in shared.items() if most and count == most]
    return difflib.get_close_matches(wanted, best, n=_MOST_SHOWN, cutoff=0.0)


def _meant_by_misspelt(wanted: str, valid: Iterable[str]) -> str:
    """Our name for the other trainers' name that `wanted` is spelt like. "" if a valid name is more like
    it."""
    close = difflib.get_close_matches(wanted, [*valid, *_OURS], n=1, cutoff=0.8)
    if not close:
        return ""
    return _OURS.get(close[0], "")


def _plain(name: str) -> str:
    return name.lower().removeprefix("--").replace("-", "_")
