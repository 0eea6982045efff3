"""Keys of verl and of its one-step-off trainer."""

from __future__ import annotations

from roll.configs.compat import Names, UnsupportedKey, if_off

SGLANG = "actor_infer.strategy_args.strategy_config"
MEGATRON = "actor_train.strategy_args.strategy_config"
TRAINING = "actor_train.training_args"
SAMPLING = "actor_infer.generating_args"

NAMES: Names = {
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

MOVED_KEYS = {"bypass_mode": "old_log_probs_source"}

MOVED_VALUES: dict[str, dict[bool, str]] = {"bypass_mode": {True: "behavior", False: "recompute"}}

RENAMED_VALUES = {"kl_penalty": {"kl": "k1", "mse": "k2"}}

UNSUPPORTED_KEYS = (
    *(
        UnsupportedKey(pattern, bool, "engines always return log-probs; whether they are used: old_log_probs_source")
        for pattern in ("calculate_log_probs", "*.calculate_log_probs")
    ),
    *(
        UnsupportedKey(pattern, if_off, "engines keep their memory between steps; set it to false")
        for pattern in ("free_cache_engine", "*.free_cache_engine")
    ),
)
