"""The names that well-known trainers give to the purposes of our settings. Pure data.

Sources: the arguments of TRL, verl, slime, OpenRLHF, SkyRL, NeMo-RL, prime-rl, AReaL
and Lightning."""

OTHER_TRAINERS: dict[str, str] = {
    "model_path": "model model_name model_id model_name_or_path base_model pretrain pretrained hf_checkpoint",
    "task_file": (
        "dataset datasets dataset_name dataset_path data data_file train_data train_file"
        " train_files prompt_data prompts tasks"
    ),
    "eval.task_file": "eval_dataset eval_data eval_file val_data val_file val_files test_data test_file",
    "eval.sets": "eval_datasets eval_prompt_data",
    "rollout_function_path": (
        "agent agent_path env rollout rollout_fn rollout_function workflow"
        " custom_generate_function_path"
    ),
    "reward_function_path": (
        "reward reward_fn reward_func reward_funcs reward_function reward_path custom_rm_path"
    ),
    "lr": "learning_rate actor_lr actor_learning_rate actor_optim_lr step_size",
    "critic.lr": "value_lr lr_critic critic_learning_rate vf_lr critic_optim_lr",
    "critic.data_parallel_size": "critic_num_gpus critic_num_gpus_per_node critic_ranks critic_dp_size",
    "critic.warmup_steps": "critic_warmup value_pretrain_steps num_critic_only_steps",
    "critic.model_path": "critic_model value_model value_model_path critic_path critic_pretrain critic_load",
    "critic.value_clip": "cliprange_value value_clip_range vf_clip eps_clip_value",
    "critic.gae_lambda": "lam lambd lambda gae_lam",
    "discount": "gamma",
    "lora.rank": "lora_rank lora_r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "lora_target_modules target_modules lora_targets",
    "lora.path": "lora_path adapter_path adapter_name_or_path peft_model_path lora_adapter_path",
    "lr_warmup_steps": "warmup warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio lr_warmup_fraction",
    "lr_decay_style": "lr_scheduler lr_scheduler_type scheduler learning_rate_scheduler",
    "lr_min": "min_lr min_lr_ratio",
    "clip_grad": "max_grad_norm grad_clip gradient_clipping grad_norm_clip max_norm",
    "rollout_batch_size": (
        "batch_size train_batch_size global_batch_size per_device_train_batch_size prompts_per_step"
        " groups_per_batch num_prompts_per_step micro_rollout_batch_size"
    ),
    "n_samples_per_prompt": (
        "n rollout_n num_generations num_samples n_samples group_size num_return_sequences"
        " samples_per_prompt rollouts_per_example num_generations_per_prompt"
    ),
    "num_mini_batches": (
        "mini_batch_size ppo_mini_batch_size num_iterations ppo_epochs"
        " updates_per_batch num_steps_per_rollout"
    ),
    "max_tokens_per_micro_batch": (
        "micro_batch_size per_device_batch_size gradient_accumulation_steps max_tokens_per_gpu"
        " micro_train_batch_size micro_batch_size_per_gpu ppo_micro_batch_size_per_gpu"
        " ppo_max_token_len_per_gpu train_mb_tokens log_prob_micro_batch_size_per_gpu"
        " train_micro_batch_size logprob_batch_size"
    ),
    "max_sample_tokens": (
        "max_seq_length_train max_row_length train_max_length max_sequence_length cutoff_len"
        " max_prompt_length max_prompt_len rollout_max_prompt_len prompt_length prompt_max_len"
        " max_input_seq_length max_total_sequence_length seq_len"
    ),
    "num_steps": (
        "max_steps steps total_steps train_steps total_training_steps num_rollout iterations"
        " num_episodes max_num_steps"
    ),
    "data.epochs": (
        "epochs epoch n_epochs num_epochs num_train_epochs total_epochs max_epochs sft_epochs"
        " num_epoch max_num_epochs"
    ),
    "dpo.beta": "dpo_beta",
    "max_new_tokens": (
        "max_tokens max_completion_length max_completion_tokens max_response_length max_response_len"
        " max_output_tokens max_length generate_max_len response_length rollout_max_response_len"
        " eval_max_response_len"
    ),
    "engine.max_total_tokens": (
        "context_length max_context_length max_model_len max_seq_len max_seq_length"
        " rollout_max_context_len"
    ),
    "kl.estimator": "kl_loss_type kl_type kl_penalty reference_policy_kl_type",
    "kl.added_to": "use_kl_in_reward",
    "entropy.coefficient": "entropy_coeff entropy_loss_coef entropy_bonus entropy_loss_weight",
    "group_filter": (
        "dynamic_sampling dynamic_sampling_filter_path filter_groups filter_groups_enable"
        " dynamic_filtering use_dynamic_sampling online_difficulty_filtering"
    ),
    "over_sampling_groups": "over_sampling_batch_size gen_batch_size",
    "task_label_key": (
        "label_key answer_key target_key reference_key solution_key label_column reward_fn_key"
        " ground_truth_key"
    ),
    "task_id_key": "id_key index_key",
    "eval.samples_per_task": "n_samples_per_eval_prompt eval_n_samples eval_num_samples val_kwargs_n",
    "colocate": (
        "colocate_all colocate_all_models colocated colocate_mode share_gpus colocate_actor_ref"
        " colocated_enabled"
    ),
    "temperature": "temp sampling_temperature rollout_temperature",
    "algorithm_preset": "algorithm algo preset trainer",
    "advantage": (
        "advantage_estimator adv_estimator norm_adv_by_std norm_adv_by_std_in_grpo scale_rewards"
        " no_advantage_std_norm use_leave_one_out_baseline disable_rewards_normalization"
        " normalize_rewards normalize_reward"
    ),
    "policy_loss": "loss loss_fn loss_type loss_function custom_loss_function_path policy_loss_mode",
    "aggregation": "loss_agg_mode loss_aggregation token_level_loss calculate_per_token_loss",
    "kl.coefficient": (
        "beta grpo_beta kl_beta kl_coeff kl_loss kl_loss_coef use_kl_loss init_kl_coef kl_weight"
        " kl_coef reference_policy_kl_penalty kl_tau"
    ),
    "eps_clip_low": (
        "epsilon clip_range cliprange clip_eps clip_ratio eps_clip epsilon_low clip_ratio_low"
        " ratio_clip_min"
    ),
    "eps_clip_high": "epsilon_high clip_ratio_high clip_higher ratio_clip_max",
    "dual_clip": "clip_ratio_c eps_clip_c ratio_clip_c",
    "correction": (
        "use_tis rollout_is importance_sampling_correction vllm_importance_sampling_correction"
        " enable_vllm_is_correction use_importance_sampling_correction"
    ),
    "correction_cap": (
        "tis_clip rollout_is_threshold vllm_importance_sampling_cap vllm_is_truncated_threshold"
        " tis_imp_ratio_cap"
    ),
    "correction_floor": "tis_clip_low",
    "ratio_level": "importance_sampling_level ratio_type",
    "advantage_whitening": "normalize_advantages whiten_advantages",
    "truncated_rollouts": "mask_truncated_completions overlong_filtering",
    "max_staleness": (
        "off_policy off_policy_steps max_off_policy_steps async_level staleness"
        " max_trajectory_age_steps async_train"
    ),
    "num_engines": (
        "num_gpus n_gpus gpus num_replicas replicas rollout_num_gpus rollout_num_engines"
        " num_infer_gpus vllm_num_engines"
    ),
    "engine.tp_size": (
        "tensor_parallel_size vllm_tensor_parallel_size rollout_tensor_model_parallel_size"
        " rollout_num_gpus_per_engine rollout_tp inference_tp"
    ),
    "data_parallel_size": (
        "world_size dp_size nproc_per_node num_processes actor_num_gpus actor_num_gpus_per_node"
        " n_gpus_per_node num_gpus_per_node gpus_per_node num_train_gpus"
    ),
    "tensor_model_parallel_size": "tp tp_size train_tp",
    "context_parallel_size": "cp cp_size sequence_parallel_size ulysses_sequence_parallel_size ring_attn_size",
    "expert_model_parallel_size": "ep ep_size train_ep expert_parallel_size",
    "pipeline_model_parallel_size": "pp pp_size train_pp",
    "routing_replay": "router_replay r2 r3 use_routing_replay use_rollout_routing_replay",
    "ratio_weight": "router_shift router_shift_gamma_min gamma_min rspo_gamma_min",
    "reference_model_path": (
        "ref_model ref_model_path ref_model_name reference_model ref_load sft_model_path ref_pretrain"
    ),
    "reference.ema": "ref_model_mixup_alpha ema_beta enable_ema",
    "reference.reset_steps": "ref_model_sync_steps sync_ref_model ref_update_interval",
    "teacher.model_path": "teacher_model teacher_model_name teacher_model_name_or_path teacher_path",
    "teacher.url": "teacher_server teacher_model_server_url teacher_base_url teacher_address",
    "reference_placement": "ref_offload ref_param_offload offload_ref ref_cpu_offload",
    "train_dtype": "dtype torch_dtype bf16 fp16 precision mixed_precision",
    "run_name": "name exp_name experiment experiment_name run_id",
    "run_root": (
        "output output_dir out_dir save save_dir save_path log_dir logdir default_root_dir ckpt_dir"
        " checkpoint_dir default_local_dir"
    ),
    "save_interval": (
        "save_steps save_freq save_every save_strategy checkpoint_interval ckpt_interval save_period"
    ),
    "checkpoints.keep": "save_total_limit max_ckpt_num max_checkpoints max_actor_ckpt_to_keep keep_last",
    "max_shard_gb": "max_shard_size shard_size",
    "checkpoints.keep_best": "load_best_model_at_end save_best save_top_k keep_top_k",
    "checkpoints.keep_best_by": "metric_for_best_model best_metric monitor metric_name",
    "eval.interval": "eval_steps eval_freq eval_every eval_strategy test_freq val_interval val_period",
    "eval.tasks": "eval_size num_eval eval_batch_size num_eval_examples max_val_samples num_examples",
    "rollout_concurrency": "concurrency max_concurrency max_concurrent num_workers parallelism",
    "rollout_timeout_s": "timeout rollout_timeout",
    "workers.count": "agent_num_workers num_rollout_workers",
    "gateway.port": "port",
    "gateway.host": "host address",
    "wandb.project": "report_to logger use_wandb wandb_name project project_name wandb_enabled",
    "metrics.tensorboard": "tensorboard_enabled tensorboard_dir use_tensorboard",
    "log.samples": "log_completions num_completions_to_print log_val_generations num_val_samples_to_print",
    "save_rollout_data": "rollout_data_dir save_debug_rollout_data dump_rollout_data",
    "session.max_turns": (
        "max_turns max_assistant_turns max_rollout_turns max_tool_calling_iterations max_env_turns"
    ),
    "tool_call_parser": "tool_parser multi_turn_format",
    "metrics.mlflow_tracking_uri": "mlflow tracking_uri",
    "chat_template_path": "chat_template template",
    "seed": "random_seed rng_seed rollout_seed data_seed",
    "deterministic": "full_determinism",
    "max_restarts": "retries max_retries auto_resume",
}
"""Names of other trainers for a setting, or for one with that purpose, by setting of
ours."""
ON_FILES = {
    "task_file": "data_path",
    "eval.task_file": "data.eval_path",
    "eval.sets": "data.eval_path",
    "eval.tasks": "data.eval_fraction",
    "rollout_batch_size": "data.batch_size",
    "max_new_tokens": "max_sample_tokens",
    "engine.max_total_tokens": "max_sample_tokens",
    "kl.coefficient": "dpo.beta",
}
"""Settings of rollouts, and their replacement in a run that trains on a file."""
ON_ROLLOUTS = {"data.epochs": "num_steps"}
"""Settings of files, and their replacement in a run that trains on rollouts."""
_ANSWERS = {
    "`invrl resume RUN`, or the same `invrl train` command again, continues a run from its last checkpoint": (
        "resume resume_from resume_from_checkpoint resume_mode resume_path resume_from_path resume_step continue_from"
    ),
    "give a model or checkpoint as --model-path; `invrl resume RUN` continues a run": (
        "load load_path load_dir load_from ckpt_path"
    ),
    "leave it out: every step is logged, to metrics.jsonl, TensorBoard and the console": (
        "logging_steps logging_strategy log_interval log_freq log_every log_every_n_steps"
    ),
    "leave it out: the whole row is task.payload, and your function reads its field; --task-label-key names "
    "the label's": (
        "input_key prompt_key prompt_column question_key query_key text_column dataset_text_field"
        " input_template metadata_key"
    ),
    "write --lora.rank N: it trains an adapter instead of the whole model": (
        "use_lora enable_lora peft use_peft peft_config"
    ),
    "leave it out: the weights are not quantized; --lora.rank N trains an adapter beside them": (
        "qlora load_in_4bit load_in_8bit"
    ),
    "write --megatron-recompute-granularity full --megatron-recompute-method uniform "
    "--megatron-recompute-num-layers 1": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing recompute"
    ),
    "write --sglang-mem-fraction-static SHARE": (
        "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static"
    ),
    "leave it out: SGLang serves the rollouts (its options are --sglang-*)": (
        "use_vllm vllm_mode rollout_backend inference_backend generation_backend vllm_server_host"
        " vllm_server_port vllm_sync_backend vllm_model_impl async_engine"
    ),
    "write --sglang-cuda-graph-backend-decode disabled": "enforce_eager",
    "write --sglang-max-running-requests N": "max_num_seqs",
    "write --sglang-max-prefill-tokens N": "max_num_batched_tokens",
    "write --sglang-chunked-prefill-size N": "chunked_prefill_size enable_chunked_prefill",
    "write --megatron-adam-eps X": "adam_epsilon",
    "write --megatron-grad-reduce-in-fp32": "accumulate_allreduce_grads_in_fp32",
    "leave it out: it is on where --tensor-model-parallel-size is above 1": "sequence_parallel",
    "leave it out: the model folder's config.json decides what is computed": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention"
        " kv_channels vocab_size max_position_embeddings normalization norm_epsilon qk_layernorm swiglu"
        " rotary_base use_rotary_position_embeddings disable_bias_linear untie_embeddings_and_output_weights"
    ),
    "leave it out: a prompt that does not fit is refused, never cut": (
        "filter_overlong_prompts truncation overlong_prompt_filter"
    ),
    "leave it out: nothing is dropped out": (
        "attention_dropout hidden_dropout disable_dropout"
    ),
    "leave it out: your function's requests say `stop`": "rollout_stop stop_strings stop",
    "leave it out: the trainer chooses its attention; that of the engines is --sglang-attention-backend NAME": (
        "attn_implementation attn flash_attn attention_backend attention_softmax_in_fp32"
    ),
    "leave it out: engines and trainer share GPUs by turns with --colocate": (
        "free_cache_engine vllm_enable_sleep deepspeed_enable_sleep offload param_offload optimizer_offload"
    ),
    "leave it out: SGLang keeps the prefixes of conversations in its cache": (
        "enable_prefix_caching"
    ),
    "leave it out: rows are packed without padding, up to --max-tokens-per-micro-batch, and divided evenly": (
        "use_remove_padding use_dynamic_bsz use_dynamic_batch_size use_dynamic_batch packing packing_samples"
        " padding_free packing_strategy sequence_packing dynamic_batching balance_batch balance_data"
    ),
    "leave it out: the gateway records every token's log-prob as it was sampled": (
        "calculate_log_probs use_rollout_logprobs"
    ),
    "leave it out: a rollout goes on across weight updates, up to --max-staleness": (
        "partial_rollout"
    ),
    "leave it out: your function is the loop of turns and calls its tools itself": (
        "multi_turn multi_turn_enable tool_config_path tool_key tools default_agent_loop environment_factory"
    ),
    "leave it out: held-out tasks are sampled before the first step, too": (
        "val_before_train skip_eval_before_train val_at_start"
    ),
    "leave it out: Megatron-core trains (its options are --megatron-*)": (
        "deepspeed zero_stage fsdp fsdp_config accelerate train_backend strategy"
    ),
    "leave it out: --data-parallel-size and --num-engines count ranks and engines; --placement.trainer and "
    "--placement.engines name the nodes of a Ray cluster that have them": (
        "nnodes num_nodes actor_num_nodes rollout_num_nodes"
    ),
    "leave it out: training samples from the whole distribution, at --temperature": (
        "top_p top_k min_p rollout_top_p rollout_top_k eval_top_p"
    ),
    "leave it out: your function sends the messages, the system prompt too, and the gateway applies the "
    "model's chat template": "system_prompt apply_chat_template",
    "a reward is a number from code: return it, or give --reward-function-path module:name, which may ask a "
    "model": (
        "reward_model reward_model_path reward_pretrain rm_type rm_path rm_url remote_rm_url"
    ),
    "leave it out: `invrl export RUN --step N` writes a folder that can be uploaded": (
        "push_to_hub hub_model_id"
    ),
    "leave it out: the tasks of a file are shuffled anew for each pass": "rollout_shuffle",
}
"""Names for which there is no setting here, by the alternative."""
ANSWERS = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
