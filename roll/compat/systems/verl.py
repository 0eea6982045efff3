"""Keys of verl: their names here, which of them only move, and which have no effect."""

from __future__ import annotations

from typing import Any

from roll.compat.recipe import MEGATRON, SAMPLING, SGLANG, TRAINING
from roll.compat.rules import Table, read_rules

REJECTION = tuple(f"correction.rejection.{name}" for name in ("statistic", "level", "upper"))

VERL_NAMES: dict[str, str | tuple[str, ...]] = {
    "data.train_files": "actor_train.data_args.file_name",
    "data.val_files": "validation.data_args.file_name",
    "data.apply_chat_template_kwargs": "actor_train.data_args.template_kwargs",
    "data.train_batch_size": "rollout_batch_size",
    "data.max_prompt_length": "prompt_length",
    "data.max_response_length": "response_length",
    "actor_rollout_ref.model.path": "pretrain",
    "actor_rollout_ref.rollout.n": "num_return_sequences_in_group",
    "model.use_remove_padding": "actor_train.use_sequence_packing",
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
    "reward_model.model.path": "reward.model_args.model_name_or_path",
    "reward_model.overlong_buffer.len": "overlong_buffer_len",
    "reward_model.overlong_buffer.penalty_factor": "overlong_penalty_factor",
    "algorithm.lam": "lambd",
    "critic.model.path": "critic.model_args.model_name_or_path",
    "critic.optim.lr": "critic.training_args.learning_rate",
    "critic.cliprange_value": "value_clip",
    "critic.model.use_remove_padding": "critic.use_sequence_packing",
    "critic.ppo_mini_batch_size": "critic.training_args.gradient_accumulation_steps",
    "critic.ppo_micro_batch_size_per_gpu": "critic.training_args.per_device_train_batch_size",
    "critic.use_dynamic_bsz": "critic.use_dynamic_batching_in_train",
    "critic.ppo_max_token_len_per_gpu": "critic.max_tokens_per_microbatch_in_train",
    "trainer.critic_warmup": "critic_warmup",
    "actor.optim.lr": f"{TRAINING}.learning_rate",
    "actor.grad_clip": "max_grad_norm",
    "actor.ppo_mini_batch_size": f"{TRAINING}.gradient_accumulation_steps",
    "actor.ppo_micro_batch_size_per_gpu": f"{TRAINING}.per_device_train_batch_size",
    "actor.use_dynamic_bsz": "actor_train.use_dynamic_batching_in_train",
    "actor.ppo_max_token_len_per_gpu": "actor_train.max_tokens_per_microbatch_in_train",
    "actor.megatron.tensor_model_parallel_size": f"{MEGATRON}.tensor_model_parallel_size",
    "actor.ppo_epochs": "ppo_epochs",
    "actor.clip_ratio": ("pg_clip_low", "pg_clip_high"),
    "actor.clip_ratio_low": "pg_clip_low",
    "actor.clip_ratio_high": "pg_clip_high",
    "actor.clip_ratio_c": "dual_clip_c",
    "actor.policy_loss.loss_mode": "actor_train.pg_variant",
    "actor.policy_loss.clip_cov_ratio": "clip_cov_ratio",
    "actor.policy_loss.clip_cov_lb": "clip_cov_lower",
    "actor.policy_loss.clip_cov_ub": "clip_cov_upper",
    "actor.policy_loss.kl_cov_ratio": "kl_cov_ratio",
    "actor.policy_loss.ppo_kl_coef": "kl_cov_coef",
    "actor.loss_agg_mode": "loss_agg_mode",
    "actor.entropy_coeff": "entropy_loss_coef",
    "actor.use_kl_loss": "use_kl_loss",
    "actor.kl_loss_coef": "kl_loss_coef",
    "actor.kl_loss_type": "kl_loss_type",
    "algorithm.kl_penalty": "kl_penalty",
    "algorithm.use_kl_in_reward": "add_token_level_kl",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef",
    "algorithm.adv_estimator": "adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo": "grpo_norm_by_std",
    "algorithm.gdpo_reward_keys": "rewards.<name>.tag_included",
    "algorithm.gdpo_reward_weights": "rewards.<name>.weight",
    "algorithm.rollout_correction.rollout_is": "correction.weights.level",
    "rollout_is_threshold": "correction.weights.upper",
    **dict.fromkeys(("algorithm.rollout_correction.rollout_rs", "rollout_rs_threshold"), REJECTION),
    "trainer.total_training_steps": "max_steps",
    "trainer.total_epochs": "max_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.default_local_dir": "output_dir",
    "trainer.experiment_name": "exp_name",
    "trainer.logger": "track_with",
    "trainer.resume_mode": "resume_from_checkpoint",
    "custom_reward_function.path": "rewards.<name>.function",
    "custom_reward_function.name": "rewards.<name>.function",
    "wait_prev_gen": "async_generation_ratio",
    "partial_rollout": "in_flight_policy",
    "require_batches": "rollout_batch_size",
    "trigger_parameter_sync_step": "rollout_batch_size",
    "total_rollout_steps": "max_steps",
}

ACTOR, ROLLOUT, MODEL, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model", "ref"))

CONVERTED = """
require_batches trigger_parameter_sync_step total_rollout_steps partial_rollout wait_prev_gen rollout.val_kwargs.*
trainer.nnodes trainer.n_gpus_per_node rollout.nnodes rollout.n_gpus_per_node trainer.total_epochs trainer.resume_mode
actor.ppo_mini_batch_size critic.ppo_mini_batch_size actor.clip_ratio_c
actor.ppo_max_token_len_per_gpu critic.ppo_max_token_len_per_gpu
reward_model.model.path reward_model.overlong_buffer.len reward_model.overlong_buffer.penalty_factor
algorithm.rollout_correction.rollout_is rollout_is_threshold algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights
custom_reward_function.path custom_reward_function.name
""".split()
"""Names whose values mean something else here; functions read them, or they are refused."""

LAYOUT = "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size " \
         "context_parallel_size expert_model_parallel_size sequence_parallel"  # fmt: skip

RECOMPUTING = "recompute_granularity recompute_method recompute_num_layers"

SCHEDULE = {
    "lr_warmup_steps": "warmup_steps",
    "lr_warmup_steps_ratio": "warmup_ratio",
    "weight_decay": "weight_decay",
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style", "warmup_style"), "lr_scheduler_type"),
}
"""Key of verl's optimizers -> key of `training_args`."""

SAMPLES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "n": "num_return_sequences"}


def _full(name: str) -> str:
    return f"actor_rollout_ref.{name}" if name.startswith(("actor.", "rollout.", "model.")) else name


VERL_KEYS = {
    **{_full(name): ours for name, ours in VERL_NAMES.items() if isinstance(ours, str) and name not in CONVERTED},
    **{f"{ACTOR}.megatron.{name}": f"{MEGATRON}.{name}" for name in LAYOUT.split()},
    **{f"{REF}.megatron.{name}": f"reference.strategy_args.strategy_config.{name}" for name in LAYOUT.split()},
    **{f"{ACTOR}.optim.{name}": f"{TRAINING}.{ours}" for name, ours in SCHEDULE.items()},
    **{f"critic.optim.{name}": f"critic.training_args.{ours}" for name, ours in SCHEDULE.items()},
    **{f"{ROLLOUT}.val_kwargs.{name}": f"validation.generating_args.{ours}" for name, ours in SAMPLES.items()},
    f"{ROLLOUT}.free_cache_engine": "is_offload_states",
    f"{MODEL}.enable_gradient_checkpointing": f"{MEGATRON}.recompute_granularity",
    **{f"{ACTOR}.megatron.override_transformer_config.{name}": f"{MEGATRON}.{name}" for name in RECOMPUTING.split()},
    f"{ACTOR}.optim.clip_grad": "max_grad_norm",
    "data.prompt_key": "actor_train.data_args.prompt",
    "data.seed": "seed",
    "data.shuffle": "actor_train.data_args.shuffle",
    "data.reward_fn_key": "actor_train.data_args.tag",
    "algorithm.gamma": "gamma",
    "trainer.device": "platform",
    "trainer.max_actor_ckpt_to_keep": "max_ckpt_to_keep",
    "rollout.test_freq": "eval_steps",
    "async_training.compute_prox_log_prob": "old_log_probs_source",
}  # fmt: skip
"""Path in a file of verl -> key here with the same values, but for those of `MOVED_VALUES`."""

CORRECTION = "algorithm.rollout_correction"

BYPASS = ("bypass_mode", f"{CORRECTION}.bypass_mode")

KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _is_disabled(section: Any) -> bool:
    return not (isinstance(section, dict) and section.get("enable"))


def _has_one_turn(agent: Any) -> bool:
    """Whether verl's section of agents has no loop but that of one turn."""
    loops = ("default_agent_loop", "agent_loop_config_path")
    return not isinstance(agent, dict) or all(agent.get(name) in (None, "single_turn_agent") for name in loops)


VERL_RULES = """
[]
actor_rollout_ref.rollout.agent if one_turn: turns are those of a TextEnv (docs/environments/own.md)
actor_rollout_ref.*.strategy actor_rollout_ref.*.fsdp_config critic.strategy critic.fsdp_config
    critic.model.fsdp_config *.*.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size
    *.*.megatron.*_offload critic.megatron.*_offload *.*.megatron.*mbridge *.*.megatron.*dist_checkpoint*
    *.model.use_liger *.model.use_shm *.*.use_torch_compile *.*.use_fused_kernels *.model.enable_activation_offload
    *.actor.entropy_from_* *.actor.entropy_checkpointing: Megatron trains with its own layout and kernels, not
    those of FSDP
*.rollout.name *.rollout.mode *.rollout.engine_kwargs *.rollout.load_format *.rollout.dtype *.rollout.layered_summon
    *.rollout.enable_chunked_prefill *.rollout.max_num_batched_tokens *.rollout.enforce_eager *.rollout.max_model_len
    *.rollout.enable_prefix_caching *.rollout.disable_log_stats: engines are SGLang's, with its defaults;
    actor_infer.strategy_args.strategy_config has its options
*.rollout.log_prob_* *.ref.log_prob_*: log-probs are computed in the micro-batches of training
*.rollout.prompt_length *.rollout.response_length *.reward_kwargs.max_resp_len data.truncation
    data.filter_overlong_prompts*: prompt_length and response_length are the lengths; longer prompts are left out, never
    cut
data.val_batch_size: all prompts of validation are submitted at once
data.train_max_samples data.val_max_samples if -1: all rows of a file are read
data.image_key data.video_key: rows have text alone
data.gen_batch_size: prompts are submitted one by one, and query_filter_config replaces dropped groups
*.model.override_config *.model.external_lib: the model's config.json is used as it is; change it there
*.actor.optim.total_training_steps critic.optim.total_training_steps critic.optim.clip_grad critic.grad_clip: max_steps
    and max_grad_norm are keys of the run
reward.reward_manager reward_model.reward_manager reward_model.enable: rewards are functions
*.actor.checkpoint critic.checkpoint trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep: a checkpoint has
    all roles and all that resuming needs; save_hf_checkpoints adds a Hugging Face folder
trainer.default_hdfs_dir if off: checkpoints are in output_dir
trainer.val_before_train: validation runs before step 1 where eval_steps is above 0
*.use_rollout_* *.*.use_rollout_*: old_log_probs_source says whether the log-probs of engines are used
hybrid_engine *.hybrid_engine: equal device mappings share devices; one step off is async_generation_ratio: 1
*.checkpoint_engine *.*.checkpoint_engine *.use_trainer_do_validate *.parallel_validate_and_rollout
    trainer.balance_batch trainer.ray_wait_* actor_rollout_ref.nccl_timeout trainer.log_val_generations
    trainer.rollout_data_dir trainer.validation_data_dir trainer.use_legacy_worker_impl data.return_*
    data.dataloader_num_workers: it is always done in one way
calculate_log_probs *.calculate_log_probs *.*.calculate_log_probs if on: engines always return log-probs; whether they
    are used: old_log_probs_source
calculate_sum_pi_squared *.calculate_sum_pi_squared *.*.calculate_sum_pi_squared if on: sums of squared probabilities
    are computed where adv_estimator reads them
actor_rollout_ref.rollout.multi_turn if disabled: turns are those of an environment, in pipeline: agentic
actor_rollout_ref.rollout.do_sample if on: write actor_infer.generating_args.temperature
algorithm.filter_groups if disabled: write rewards.<name>.query_filter_config
algorithm.kl_ctrl.type if fixed: write target_kl and kl_horizon
algorithm.use_pf_ppo if off: samples are not weighted by their scores
"""

VERL = Table(
    move={
        **dict.fromkeys(BYPASS, "old_log_probs_source"),
        **dict.fromkeys(("free_cache_engine", "actor_infer.free_cache_engine"), "is_offload_states"),
        **VERL_KEYS,
    },
    values={
        **{name: {True: "behavior", False: "recompute"} for name in BYPASS},
        "async_training.compute_prox_log_prob": {True: "recompute", False: "behavior"},
        f"{MODEL}.enable_gradient_checkpointing": {True: "full", False: None},
        f"{ACTOR}.policy_loss.loss_mode": {"vanilla": "ppo"},
        "kl_penalty": KL_NAMES,
        "kl_loss_type": KL_NAMES,
        "adv_estimator": {
            "grpo_vectorized": "grpo",
            "rloo_vectorized": "rloo",
            "tir_optimal_token_baseline": "optimal_token_baseline",
        },
    },
    rules=read_rules(VERL_RULES, {"disabled": _is_disabled, "one_turn": _has_one_turn}),
)
