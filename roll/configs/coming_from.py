"""What the keys of other frameworks are called here: the data of docs/coming_from.md, for what an unknown key meant."""

from __future__ import annotations

SGLANG = "actor_infer.strategy_args.strategy_config"
MEGATRON = "actor_train.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"

VERL: dict[str, str | tuple[str, ...]] = {
    "data.train_files": "actor_train.data_args.file_name",
    "data.val_files": "validation.data_args.file_name",
    "data.train_batch_size": "rollout_batch_size",
    "data.max_prompt_length": "prompt_length",
    "data.max_response_length": "response_length",
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.rollout.n": "num_return_sequences_in_group",
    "rollout.temperature": f"{SAMPLING}.temperature",
    "rollout.top_p": f"{SAMPLING}.top_p",
    "rollout.top_k": f"{SAMPLING}.top_k",
    "rollout.gpu_memory_utilization": f"{SGLANG}.mem_fraction_static",
    "rollout.tensor_model_parallel_size": "actor_infer.num_gpus_per_worker",
    "rollout.max_num_seqs": "actor_infer.max_running_requests",
    "rollout.val_kwargs.*": "validation.generating_args",
    "trainer.nnodes": "actor_train.device_mapping",
    "trainer.n_gpus_per_node": "num_devices_per_node",
    "rollout.nnodes": "actor_infer.device_mapping",
    "rollout.n_gpus_per_node": "actor_infer.device_mapping",
    "actor.optim.lr": f"{TRAINING}.learning_rate",
    "actor.grad_clip": "max_grad_norm",
    "actor.ppo_mini_batch_size": f"{TRAINING}.gradient_accumulation_steps",
    "actor.ppo_micro_batch_size_per_gpu": f"{TRAINING}.per_device_train_batch_size",
    "actor.use_dynamic_bsz": "actor_train.use_dynamic_batching_in_train",
    "actor.ppo_max_token_len_per_gpu": "actor_train.max_tokens_per_microbatch_in_train",
    "actor.megatron.tensor_model_parallel_size": f"{MEGATRON}.tensor_model_parallel_size",
    "actor.ppo_epochs": "ppo_epochs",
    "actor.clip_ratio_low": "pg_clip_low",
    "actor.clip_ratio_high": "pg_clip_high",
    "actor.clip_ratio_c": "dual_clip_c",
    "actor.policy_loss.loss_mode": "actor_train.pg_variant",
    "actor.loss_agg_mode": "loss_agg_mode",
    "actor.entropy_coeff": "entropy_loss_coef",
    "actor.use_kl_loss": "use_kl_loss",
    "actor.kl_loss_coef": "kl_loss_coef",
    "actor.kl_loss_type": "kl_penalty",
    "algorithm.kl_penalty": "kl_penalty",
    "algorithm.use_kl_in_reward": "add_token_level_kl",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.adv_estimator": "adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "grpo_norm_by_std",
    "algorithm.rollout_correction.rollout_is": "correction.weights.level",
    "rollout_is_threshold": "correction.weights.upper",
    "algorithm.rollout_correction.rollout_rs": (
        "correction.rejection.statistic",
        "correction.rejection.level",
        "correction.rejection.upper",
    ),
    "rollout_rs_threshold": (
        "correction.rejection.statistic",
        "correction.rejection.level",
        "correction.rejection.upper",
    ),
    "trainer.total_training_steps": "max_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "exp_name",
    "trainer.logger": "track_with",
    "trainer.resume_mode": "resume_from_checkpoint",
    "custom_reward_function.path": "rewards.<name>.function",
    "custom_reward_function.name": "rewards.<name>.function",
    "hybrid_engine": "actor_infer.device_mapping",
    "wait_prev_gen": "async_generation_ratio",
    "partial_rollout": "in_flight_policy",
    "require_batches": "rollout_batch_size",
    "trigger_parameter_sync_step": "rollout_batch_size",
}

SLIME: dict[str, str | tuple[str, ...]] = {
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
    "eps_clip_high": "pg_clip_high",
    "use_tis": "correction.weights.level",
    "calculate_per_token_loss": "loss_agg_mode",
    "entropy_coef": "entropy_loss_coef",
    "use_dynamic_batch_size": "actor_train.use_dynamic_batching_in_train",
    "max_tokens_per_gpu": "actor_train.max_tokens_per_microbatch_in_train",
    "dynamic_sampling_filter_path": "rewards.<name>.query_filter_config.type",
    "update_weight_buffer_size": "model_update_buffer_size_mb",
    "custom_rm_path": "rewards.<name>.function",
    "sglang_mem_fraction_static": f"{SGLANG}.mem_fraction_static",
    "save": "output_dir",
    "save_interval": "save_steps",
    "load": "resume_from_checkpoint",
    "eval_interval": "eval_steps",
}

TRL: dict[str, str | tuple[str, ...]] = {
    "num_generations": "num_return_sequences_in_group",
    "generation_batch_size": "rollout_batch_size",
    "max_prompt_length": "prompt_length",
    "max_completion_length": "response_length",
    "save_total_limit": "max_ckpt_to_keep",
    "report_to": "track_with",
    "run_name": "exp_name",
    "num_iterations": "ppo_epochs",
    "beta": ("use_kl_loss", "kl_loss_coef"),
    "epsilon": "pg_clip_low",
    "epsilon_high": "pg_clip_high",
    "scale_rewards": "grpo_norm_by_std",
    "loss_type": "loss_agg_mode",
    "importance_sampling_level": "actor_train.pg_variant",
    "vllm_importance_sampling_correction": "correction.weights.level",
    "vllm_importance_sampling_cap": "correction.weights.upper",
    "use_vllm": "actor_infer.device_mapping",
    "vllm_mode": "actor_infer.device_mapping",
    "vllm_gpu_memory_utilization": f"{SGLANG}.mem_fraction_static",
    "vllm_tensor_parallel_size": "actor_infer.num_gpus_per_worker",
    "gradient_checkpointing": f"{MEGATRON}.recompute_granularity",
    "bf16": "<role>.model_args.dtype",
    "reward_funcs": "rewards.<name>.function",
}

ROLL: dict[str, str | tuple[str, ...]] = {
    "train_infer_correction": "correction",
    "world_size": "<role>.device_mapping",
}

SHORT: dict[str, str | tuple[str, ...]] = {
    "tp_size": (f"{MEGATRON}.tensor_model_parallel_size", "actor_infer.num_gpus_per_worker"),
    "pp_size": f"{MEGATRON}.pipeline_model_parallel_size",
}
"""Names that many use and no table needs."""

NAMES: dict[str, tuple[str, ...]] = {
    name: (ours,) if isinstance(ours, str) else ours for name, ours in {**VERL, **SLIME, **TRL, **ROLL, **SHORT}.items()
}
"""Name elsewhere -> keys here. A name ends the path it stands for; `.*` is any key of its section."""

EMPTY_WORDS = ("n", "name", "path")
"""Last parts of names that say nothing without what stands before them."""


def keys_here(path: str) -> tuple[str, ...]:
    """The keys that an unknown path of another framework, or the end of it, stands for; none where no table has it."""
    for end in _ends(path):
        if end in NAMES:
            return NAMES[end]
        section = end.rpartition(".")[0]
        if f"{section}.*" in NAMES:
            return NAMES[f"{section}.*"]
    return ()


def keys_of_short(path: str) -> tuple[str, ...]:
    """As `keys_here`, for a path that leaves out where its name stands: `lr` for `actor.optim.lr`."""
    for end in _ends(path):
        found = [ours for name, keys in NAMES.items() if name.endswith(f".{end}") for ours in keys]
        if found and end not in EMPTY_WORDS:
            return tuple(dict.fromkeys(found))
    return ()


def _ends(path: str) -> list[str]:
    """The path, and what is left of it without its first part, its first two, and so on."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]
