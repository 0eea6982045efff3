"""Arguments of slime, without leading dashes."""

from __future__ import annotations

from roll.configs.compat import SAMPLING, SGLANG, TRAINING, Names

NAMES: Names = {
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
    "save": "output_dir",
    "save_interval": "save_steps",
    "load": "resume_from_checkpoint",
    "eval_interval": "eval_steps",
}
