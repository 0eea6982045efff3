"""Keys of other systems that are refused with their names here; docs/coming_from.md has the same tables."""

from __future__ import annotations

from roll.compat.recipe import MEGATRON, SAMPLING, SGLANG, TRAINING
from roll.compat.systems.verl import VERL_NAMES

Names = dict[str, str | tuple[str, ...]]
"""Name in another framework -> key or keys of this project. A name is the end of a path; `.*` is any key."""

SLIME_NAMES: Names = {
    "hf_checkpoint": "pretrain",
    "ref_load": "reference.model_args.model_name_or_path",
    "actor_num_nodes": "actor_train.device_mapping",
    "actor_num_gpus_per_node": "num_devices_per_node",
    "rollout_num_gpus": "actor_infer.device_mapping",
    "rollout_num_gpus_per_engine": "actor_infer.num_gpus_per_worker",
    "colocate": "actor_infer.device_mapping",
    "prompt_data": "actor_train.data_args.file_name",
    "input_key": "actor_train.data_args.prompt",
    "label_key": "actor_train.data_args.ground_truth",
    "apply_chat_template": "actor_train.data_args.template",
    "n_samples_per_prompt": "num_return_sequences_in_group",
    "global_batch_size": f"{TRAINING}.gradient_accumulation_steps",
    "num_rollout": "max_steps",
    "rollout_max_response_len": "response_length",
    "rollout_temperature": f"{SAMPLING}.temperature",
    "advantage_estimator": "adv_estimator",
    "eps_clip": "pg_clip_low",
    "critic_lr": "critic.training_args.learning_rate",
    "critic_load": "critic.model_args.model_name_or_path",
    "num_critic_only_steps": "critic_warmup",
    "eps_clip_high": "pg_clip_high",
    "use_tis": "correction.weights.level",
    "use_opsm": "correction.opsm_delta",
    "calculate_per_token_loss": "loss_agg_mode",
    "entropy_coef": "entropy_loss_coef",
    "use_dynamic_batch_size": "actor_train.use_dynamic_batching_in_train",
    "max_tokens_per_gpu": "actor_train.max_tokens_per_microbatch_in_train",
    "dynamic_sampling_filter_path": "rewards.<name>.query_filter_config.type",
    "update_weight_buffer_size": "model_update_buffer_size_mb",
    "custom_rm_path": "rewards.<name>.function",
    "sglang_mem_fraction_static": f"{SGLANG}.mem_fraction_static",
    "rollout_health_check_interval": "health_check_interval_s",
    "rollout_health_check_timeout": "health_check_timeout_s",
    "save": "output_dir",
    "save_interval": "save_steps",
    "load": "resume_from_checkpoint",
    "eval_interval": "eval_steps",
}
"""Arguments of slime, without leading dashes."""

TRL_NAMES: Names = {
    "num_generations": "num_return_sequences_in_group",
    "generation_batch_size": "rollout_batch_size",
    "max_prompt_length": "prompt_length",
    "max_completion_length": "response_length",
    "num_train_epochs": "max_steps",
    "save_total_limit": "max_ckpt_to_keep",
    "report_to": "track_with",
    "run_name": "exp_name",
    "num_iterations": "ppo_epochs",
    "chat_template_kwargs": "actor_train.data_args.template_kwargs",
    "beta": ("use_kl_loss", "kl_loss_coef"),
    "epsilon": "pg_clip_low",
    "epsilon_high": "pg_clip_high",
    "scale_rewards": "grpo_norm_by_std",
    "multi_objective_aggregation": "adv_estimator",
    "loss_type": "loss_agg_mode",
    "importance_sampling_level": "actor_train.pg_variant",
    "vllm_importance_sampling_correction": "correction.weights.level",
    "vllm_importance_sampling_cap": "correction.weights.upper",
    "vllm_importance_sampling_clip_max": "correction.weights.upper",
    "vllm_importance_sampling_clip_min": "correction.weights.lower",
    "off_policy_mask_threshold": "correction.opsm_delta",
    "delta": ("dual_clip_loss", "dual_clip_c"),
    "use_vllm": "actor_infer.device_mapping",
    "vllm_mode": "actor_infer.device_mapping",
    "vllm_gpu_memory_utilization": f"{SGLANG}.mem_fraction_static",
    "vllm_tensor_parallel_size": "actor_infer.num_gpus_per_worker",
    "gradient_checkpointing": f"{MEGATRON}.recompute_granularity",
    "bf16": "<role>.model_args.dtype",
    "vllm_enable_sleep_mode": "is_offload_states",
    "mask_truncated_completions": "max_len_mask",
    "log_completions": "rollout_dump_steps",
    "steps_per_generation": "rollout_batch_size",
    "dataset_config": "actor_train.data_args.subset",
    "dataset_train_split": "actor_train.data_args.split",
    "shuffle_dataset": "actor_train.data_args.shuffle",
    "reward_funcs": "rewards.<name>.function",
    "reward_weights": "rewards.<name>.weight",
}
"""Arguments of TRL's GRPOConfig."""

EVERYDAY = {
    "<role>.training_args.learning_rate": "lr actor_learning_rate",
    "<role>.training_args.lr_scheduler_type": "scheduler lr_scheduler lr_schedule",
    "<role>.training_args.warmup_steps": "warmup num_warmup_steps lr_warmup",
    "max_steps": "epochs num_epochs n_epochs steps num_steps total_steps train_steps max_iters",
    "rollout_batch_size actor_train.training_args.per_device_train_batch_size": "batch_size bs",
    "<role>.training_args.per_device_train_batch_size": "micro_batch_size micro_train_batch_size",
    "<role>.training_args.gradient_accumulation_steps": "mini_batch_size grad_accum grad_accum_steps",
    "num_return_sequences_in_group": "group_size num_samples n_samples rollout_n num_rollouts",
    "kl_loss_coef init_kl_coef": "kl kl_coef kl_beta kl_coeff",
    "response_length": "max_new_tokens max_tokens max_len max_response_len response_len max_gen_len generate_max_len",
    "prompt_length": "max_prompt_len prompt_len",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length context_length cutoff_len",
    "actor_train.device_mapping actor_infer.device_mapping": "gpus num_gpus n_gpus ngpus gpu_ids devices num_devices",
    "pretrain <role>.model_args.model_name_or_path": "model model_name_or_path model_path model_id base_model",
    "actor_train.data_args.file_name": "data dataset dataset_name dataset_path data_path datasets train_data"
    " train_file",
    "validation.data_args.file_name": "val_data val_file eval_data eval_dataset eval_file test_file",
    "<role>.model_args.dtype": "fp16 dtype torch_dtype precision mixed_precision",
    "pg_clip_low pg_clip_high": "clip_eps clip_epsilon cliprange clip_range ppo_clip",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "rewards.<name>.function": "reward_fn reward_func reward_function",
    "adv_estimator actor_train.pg_variant": "algo algorithm rl_algorithm",
    "actor_train.pg_variant": "loss loss_fn policy_loss",
    "platform": "device accelerator",
    "actor_train.strategy_args.strategy_config": "deepspeed fsdp megatron zero_stage",
    "actor_infer.strategy_args.strategy_config": "vllm sglang",
    "track_with": "logger tracker trackers wandb use_wandb",
    "tracker_kwargs": "wandb_project project project_name",
    "output_dir": "out_dir save_dir save_path",
    "eval_steps": "eval_every eval_freq val_every eval_strategy evaluation_strategy val_before_train",
    "save_steps": "save_every checkpoint_every save_strategy",
    "logging_steps": "log_every log_interval",
    "resume_from_checkpoint": "resume resume_from",
    "reference.model_args.model_name_or_path": "ref_model ref_model_path",
    "kl_loss_type kl_penalty": "kl_estimator",
    "dpo_loss_type": "pref_loss",
    "pipeline": "stage",
    "actor_train.data_args.template": "chat_template",
    "<role>.model_args.attn_implementation": "flash_attn",
    "<role>.use_sequence_packing": "packing",
    "actor_infer.generating_args.temperature": "do_sample",
    "actor_infer.device_mapping": "vllm_num_engines colocate_all_models",
    "actor_train.strategy_args.strategy_config.optimizer_cpu_offload": "offload",
    "actor_train.training_args": "optimizer",
    "save_hf_model": "push_to_hub",
    "async_generation_ratio": "staleness async_level off_policy_steps max_off_policy_steps",
}
"""Key or keys here -> everyday names of them."""

SHORT_NAMES: Names = {
    **dict.fromkeys(("tp_size", "tp"), (f"{MEGATRON}.tensor_model_parallel_size", "actor_infer.num_gpus_per_worker")),
    **dict.fromkeys(("pp_size", "pp"), f"{MEGATRON}.pipeline_model_parallel_size"),
    **{name: tuple(ours.split()) for ours, names in EVERYDAY.items() for name in names.split()},
}
"""Short names used by many frameworks."""

NAMES: dict[str, tuple[str, ...]] = {
    name: (ours,) if isinstance(ours, str) else ours
    for table in (VERL_NAMES, SLIME_NAMES, TRL_NAMES, SHORT_NAMES)
    for name, ours in table.items()
}

EPOCHS = "epochs x rows of the data / rows of a batch"

VALUE_HINTS = {
    "loss_mode": "vanilla there is ppo here",
    "use_opsm": "against the engine's log-probs: 1e-2 or more in half precision",
    "loss_type": "cispo is a pg_variant, and cispo_epsilon_high is epsilon_high - 1",
    "steps_per_generation": "per_device_train_batch_size x devices x this / num_generations",
    "log_completions": "samples of the newest steps are always kept",
    "optimizer": "the optimizer is Adam; its numbers are there",
    "push_to_hub": "the model is exported to output_dir/hf_model; upload it with huggingface-cli",
    "do_sample": "0 is greedy, in validation",
    "stage": "rlvr, agentic, sft, dpo or reward_model",
    "val_before_train": "above 0 it runs before step 1 too",
    "colocate_all_models": "equal device mappings share devices",
    "vllm_num_engines": "num_gpus_per_worker devices each",
    **dict.fromkeys(("total_epochs", "num_train_epochs", "epochs", "num_epochs", "n_epochs"), EPOCHS),
}
"""Last part of a name in `NAMES` -> which of its values has another name in this project, or how it is computed."""
