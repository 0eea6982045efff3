"""Arguments of TRL's GRPOConfig."""

from __future__ import annotations

from roll.configs.compat import MEGATRON, SGLANG, Names

NAMES: Names = {
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
    "reward_funcs": "rewards.<name>.function",
    "reward_weights": "rewards.<name>.weight",
}
