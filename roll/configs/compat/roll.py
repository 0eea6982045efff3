"""Keys of ROLL that differ from ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from roll.configs.compat import UnsupportedKey, always, if_off, never

RENAMED_KEYS = {"num_gpus_per_node": "num_devices_per_node", "rpc_timeout": "rpc_timeout_s", "sft_train": "actor_train"}

VISION_PART = re.compile(r"vis(ion|ual)|image|video|audio|talker|code2wav|projector", re.IGNORECASE)
"""Parts of a model that one for text does not have, such as `vision_model.blocks`."""


def freezes_text(value: Any) -> bool:
    """Whether `freeze_module_prefix` names a part that a model for text has."""
    names = value.split(",") if isinstance(value, str) else value or []
    return not isinstance(names, list) or any(not VISION_PART.search(str(name)) for name in names)


COLUMNS = "actor_train.data_args"

MOVED_KEYS = {
    "teacher.opd_kl_coef": "opd_kl_coef",
    "teacher": "reference",
    "student_pretrain": "pretrain",
    "student_train": "actor_train",
    "student_infer": "actor_infer",
    "env_monitor.hung_timeout": "trajectory_timeout_s",
    "checkpoint_config.output_dir": "checkpoint_dir",
    "max_running_requests": "actor_infer.max_running_requests",
    "pg_variant": "actor_train.pg_variant",
    "prompt_key": f"{COLUMNS}.prompt",
    "query_key": f"{COLUMNS}.query",
    "response_key": f"{COLUMNS}.response",
    "system_key": f"{COLUMNS}.system",
    "actor_train.model_args.flash_attn": "actor_train.model_args.attn_implementation",
    "reference.model_args.flash_attn": "reference.model_args.attn_implementation",
    "actor_infer.model_args.flash_attn": "actor_infer.model_args.attn_implementation",
    **{
        f"actor_train.{key}": key
        for key in (
            "tis_lower_bound",
            "tis_upper_bound",
            "topr_positive_weight",
            "topr_negative_weight",
            "cispo_epsilon_low",
            "cispo_epsilon_high",
            "cispo_use_unified_mask",
            "kimi15_tau",
        )
    },
}

RENAMED_VALUES = {
    "attn_implementation": {"flash_attention_2": "fa2"},
    "dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "template": {
        "qwen_25": "qwen2_5",
        "qwen3_coder": "native",
        "native_nonthinking": "native",
        "longCOT_qwen2.5": "native",
        "longcot_V3": "native",
        "base": "native",
        "empty": "chatml",
    },
    "lr_scheduler_type": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "polynomial": "linear",
        "inverse_sqrt": "cosine",
    },
}
"""Templates and schedules of ROLL without a counterpart -> the nearest that this project has."""

REWARD_KEYS = (
    *("*_args", "device_mapping", "num_gpus_per_worker", "infer_batch_size", "max_concurrency", "system_envs", "name"),
    *("format_pattern", "judge_model_type", "code_url", "use_local", "reward_manager_config"),
)
"""Keys of `rewards.<name>` in ROLL, where a reward is a role of workers; `roll_rewards` reads the others."""

ENVIRONMENTS = ("sokoban_sandbox", "sokoban_mcp")
"""Environments of ROLL whose names look like misspelled names of built-in environments."""

OF_ENTRIES = """env_manager_cls *_pattern *_format_penalty *agent_system_template *agent_template user_prompt_*
reward_template""".split()
"""Keys at the top of recipes for agents, which entries of `custom_envs` refer to."""

AGENT_KEYS = (
    *(UnsupportedKey(key, always, "the entries of custom_envs have their own", silent=True) for key in OF_ENTRIES),
    *(
        UnsupportedKey(key, always, "entries of custom_envs are used; this is a library of them", silent=True)
        for key in ("custom_env", "gem_*")
    ),
    UnsupportedKey("agent_runner_cls", always, "no environment names it", silent=True),
    UnsupportedKey("deepspeed_*", always, "Megatron trains", silent=True),
    UnsupportedKey("default_history_length", always, "every turn sees all earlier turns", silent=True),
    UnsupportedKey(
        "*_env_manager.format_penalty", always, "write env_config.format_penalty of the entries in custom_envs"
    ),
    UnsupportedKey("train_env_manager.generating_args", always, "actor_infer.generating_args is read"),
    UnsupportedKey("val_env_manager.generating_args", always, "validation.generating_args is read"),
    UnsupportedKey("*_env_manager.world_size", always, "processes follow from max_env_num_per_worker"),
    UnsupportedKey("*_env_manager.system_envs", always, "system_envs are those of every process; write them there"),
    UnsupportedKey("*_env_manager.name", always, "the two managers have fixed names"),
    UnsupportedKey("*_env_manager.max_concurrency", always, "env_managers run every environment in its own thread"),
    UnsupportedKey("*_env_manager.worker_cls", always, "environments run in processes of a pool"),
    UnsupportedKey(
        "*_env_manager.group_filter_cls",
        lambda value: str(value).endswith(".GroupFilter"),
        "every complete group is trained on; leave it out",
    ),
    UnsupportedKey(
        "*_env_manager.llm_proxy",
        lambda value: isinstance(value, dict) and value.get("proxy_type") == "policy",
        "actions are always the policy's; an agent that calls an OpenAI-compatible endpoint becomes a TextEnv "
        "(docs/environments.md)",
    ),
    UnsupportedKey("custom_envs.*.agent_runner_cls", if_off, "agents that call an endpoint are not available yet"),
    UnsupportedKey("custom_envs.*.use_thread_lock", always, "environments share no state"),
    UnsupportedKey("custom_envs.*.max_env_step_concurrent", always, "num_env_groups bounds the steps at a time"),
    UnsupportedKey("custom_envs.*.user_prompt_format", always, "agent_template is the message"),
    UnsupportedKey("custom_envs.*.reward_template", always, "the model sees the rewards that observations name"),
    UnsupportedKey("custom_envs.*.history_length", always, "every turn sees all earlier turns"),
    UnsupportedKey("custom_envs.*.tool_wrapper", always, "tools are the environment's own; see env_type calculator"),
    UnsupportedKey("env_monitor", always, "every wait has a deadline: env_step_timeout_s, trajectory_timeout_s"),
    UnsupportedKey("partial_gpu_mode", always, "with a ratio of 0 roles take turns on the devices that they share"),
    UnsupportedKey("exp_mode", always, "environments have one mode"),
    UnsupportedKey("parse_tool_call_parameter_to_dict", if_off, "tools are the environment's own"),
    UnsupportedKey("render_save_dir", always, "rollout_dump_dir has the texts of every step"),
    UnsupportedKey("skip_mock_system_prompt", always, "messages are rendered one by one, without a mock system prompt"),
)
"""Keys of recipes for agents."""

ROLE_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "worker_cls": (always, "workers follow from strategy_name, losses from pg_variant"),
    "name": (always, "a role's name is its section"),
    "world_size": (always, "workers follow from device_mapping"),
    "backend_timeout": (always, "start_timeout_s and rpc_timeout_s bound every wait"),
    "max_concurrency": (always, "every worker answers as many calls as there are"),
    "model_update_frequency": (lambda value: value == 1, "weights are updated after every batch; set it to 1"),
    "sequence_packing_args": (always, "micro-batches are formed before they are packed"),
    "use_remove_padding": (always, "engines compute no padding; use_sequence_packing of the other roles decides"),
    "sequence_length_round_in_*": (always, "lengths are rounded up to the tensor-parallel size"),
    "offload_nccl": (always, "process groups stay"),
    "logits_in_fp32": (always, "log-probs are always computed in fp32"),
    "router_replay": (always, "the model families here are dense"),
    "apply_loss_scale": (always, "the loss is divided by the counts of the whole batch"),
    "mtp_training_mode": (always, "the model families here predict one token"),
    "topr_*_weight": (always, "only actor_train has a policy loss"),
    "opd_kl_coef": (always, "there is no teacher"),
    "tag_included": (always, "every sample is of this role"),
    "data_args.video_*": (always, "prompts are text"),
    "data_args.preprocessing_num_workers": (always, "prompts are prepared in one process"),
    "data_args.interleave_probs": (always, "domain_interleave_probs mixes the prompts"),
    "data_args.dataset_type": (always, "the type follows from the file's ending"),
    "data_args.max_samples": (if_off, "all rows are read; shorten the file"),
    "data_args.*cache*": (always, "nothing is cached"),
    "data_args.dataset_dir": (always, "prompts are read by actor_train.data_args"),
    "data_args.eval_file_name": (if_off, "validation.data_args.file_name names the files of validation"),
    "data_args.cutoff_len": (always, "prompt_length and sequence_length bound every sample"),
    "data_args.eval_dataset_dir": (always, "validation.data_args names its files"),
    "model_args.model_type": (always, "the type follows from the model's config.json"),
    "model_args.num_labels": (always, "the head is that of a language model"),
    "model_args.device_map": (always, "device_mapping places the ranks"),
    "model_args.gradient_checkpointing_use_reentrant": (always, "Megatron recomputes in its own way"),
    "model_args.model_config_kwargs": (if_off, "the model's config.json is used as it is; change it there"),
    "model_args.moe_aux_loss_coef": (always, "the model families here are dense"),
    "model_args.freeze_module_prefix": (
        lambda value: not freezes_text(value),
        "a model for text has no such part, and all of it is trained",
    ),
    "model_args.ulysses_size": (lambda value: value in (None, 0, 1), "context parallelism is not available"),
    "model_args.vision_dp": (if_off, "the model families here read text"),
    "model_args.lora_*": (always, "there is no LoRA without lora_target"),
    "model_args.additional_target": (if_off, "there is no LoRA"),
    "model_args.autocast_adapter_dtype": (always, "there is no LoRA"),
    "model_args.adapter_name_or_path": (if_off, "there is no LoRA"),
    "training_args.num_train_epochs": (always, "max_steps sets the length of the run"),
    "training_args.max_steps": (always, "max_steps of the run sets the length of the schedule"),
    "training_args.dataloader_*": (always, "there is no data loader"),
    "training_args.seed": (always, "every random choice follows from seed"),
    "training_args.bf16": (always, "model_args.dtype is the precision"),
    "training_args.fp16": (always, "model_args.dtype is the precision"),
    "training_args.save_hf_model": (always, "save_hf_model is a key of the run"),
    "training_args.output_dir": (always, "output_dir is a key of the run"),
    "training_args.logging_*": (always, "logging_steps is a key of the run"),
    "training_args.report_to": (always, "track_with is a key of the run"),
    "training_args.save_*": (always, "save_steps is a key of the run"),
    "training_args.eval_*": (always, "eval_steps is a key of the run"),
    "training_args.per_device_eval_batch_size": (always, "validation is generated; the engine forms its own batches"),
    "training_args.ddp_*": (always, "Megatron has its own data parallelism"),
    "training_args.optim": (lambda value: str(value).startswith("adam"), "the optimizer is Adam; leave it out"),
    "training_args.max_grad_norm": (always, "max_grad_norm is a key of the run"),
    "training_args.lr_scheduler_kwargs": (always, "min_learning_rate is the end of the schedule"),
    "training_args.use_distributed_optimizer": (always, "it is a key of strategy_config"),
    "generating_args.do_sample": (bool, "responses are always sampled; use validation temperature 0 for greedy"),
    "generating_args.max_length": (always, "sequence_length is the longest prompt with its response"),
    "generating_args.length_penalty": (always, "it belongs to beam search"),
    "generating_args.logprobs": (always, "engines always return the log-prob of every sampled token"),
    "generating_args.include_stop_str_in_output": (always, "the token that ends a response belongs to it"),
    "generating_args.min_new_tokens": (if_off, "a response may end at once"),
    "generating_args.min_p": (if_off, "responses are sampled from the whole distribution"),
    "generating_args.presence_penalty": (if_off, "responses are sampled from the whole distribution"),
    "generating_args.frequency_penalty": (if_off, "responses are sampled from the whole distribution"),
    "generating_args.logits_processor*": (if_off, "responses are sampled from the whole distribution"),
}
"""Key of a role -> which values are harmless, and why they have no effect."""

MEGATRON_KEYS = {
    **dict.fromkeys(
        (
            "distribute_saved_activations",
            "overlap_param_gather_with_optimizer_step",
            "overlap_p2p_comm*",
            "delay_*",
            "align_*",
            "batch_p2p_*",
            "defer_embedding_wgrad_compute",
            "ddp_*",
            "tp_comm_*",
            "cross_entropy_*",
            "masked_softmax_fusion",
            "bias_swiglu_fusion",
            "bias_gelu_fusion",
            "*_layer_norm",
            "fused_*",
            "use_flash_attn",
            "use_cpu_initialization",
            "use_te_*",
            "use_torch_*",
            "use_ring_exchange_p2p",
            "deallocate_pipeline_outputs",
            "variable_seq_lengths",
            "num_distributed_optimizer_instances",
            "compile_warmup",
            "manual_gc*",
            "timers*",
            "*cuda_graph*",
        ),
        "Megatron-Core is set up without it; it would change speed or memory",
    ),
    "main_grads_dtype": "accumulate_allreduce_grads_in_fp32 chooses the precision of gradients",
    **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "model_args.dtype is the precision"),
    **dict.fromkeys(
        ("moe_*", "expert_tensor_parallel_size", "num_moe_*", "num_experts"), "the model families here are dense"
    ),
    **dict.fromkeys(
        ("save_*", "ckpt_*", "async_save", "dist_ckpt_*", "use_checkpoint*"),
        "checkpoints have one format; save_hf_model and save_hf_checkpoints export the model",
    ),
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "max_grad_norm is a key of the run"),
    **dict.fromkeys(("lr_scheduler_kwargs",), "min_learning_rate is the end of the schedule"),
    **dict.fromkeys(("fp8*",), "training runs in the precision of model_args.dtype"),
    **dict.fromkeys(("mtp_*",), "the model families here predict one token"),
    **dict.fromkeys(
        ("check_for_nan_*", "calculate_per_token_loss", "additional_configs", "seed", "name"),
        "Megatron is set up in one way",
    ),
}
"""Option of Megatron in `strategy_config` -> why it has no effect, whatever its value."""

MEGATRON_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recompute_activations": (if_off, "write recompute_granularity: selective"),
    "decoder_first_pipeline_num_layers": (never, "write num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": (never, "write num_layers_in_last_pipeline_stage"),
    "num_layers_per_virtual_pipeline_stage": (
        never,
        "write virtual_pipeline_model_parallel_size, the number of parts of each stage",
    ),
    "pipeline_model_parallel_layout": (
        if_off,
        "write num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    ),
    "grad_reduce_in_bf16": (if_off, "write accumulate_allreduce_grads_in_fp32: false"),
    "no_rope_fusion": (if_off, "write apply_rope_fusion: false"),
    "use_fused_rope": (if_off, "write apply_rope_fusion: true"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), (if_off, "there is no dropout; set it to 0")),
    **dict.fromkeys(
        ("cpu_offloading*", "fine_grained_activation_offloading"),
        (if_off, "activations stay on the device; recompute_granularity saves their memory"),
    ),
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
        (if_off, "each data-parallel rank has whole weights; use_distributed_optimizer shards Adam's states"),
    ),
    "attention_softmax_in_fp32": (lambda value: value is True, "the softmax of attention is computed in fp32"),
    "transformer_impl": (
        lambda value: value in ("transformer_engine", "local"),
        "Transformer Engine computes the layers where it is installed",
    ),
    "microbatch_group_size_per_vp_stage": (always, "it is the number of stages, as by default in Megatron"),
    **dict.fromkeys(
        ("bucket_size", "average_in_collective", "nccl_ub", "pad_buckets_for_high_nccl_busbw"),
        (always, "buckets of gradients have Megatron's defaults"),
    ),
    "empty_unused_memory_level": (always, "cached memory is freed where devices are handed over"),
}
"""Option of Megatron in `strategy_config` -> which values are harmless, and why, or what to write instead."""

RUN_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hydra": (always, "configuration is not read by Hydra"),
    "alive_check_interval": (always, "health_check_interval_s is the interval"),
    "num_nodes": (always, "nodes follow from device_mapping and num_devices_per_node"),
    "local_rank": (always, "ranks follow from device_mapping"),
    "model_name": (always, "exp_name is the name of the run"),
    "base_dir": (always, "output_dir has everything a run writes"),
    "pipeline_cls": (always, "pipeline chooses it"),
    "checkpoint_config": (always, "checkpoints are written to files, in checkpoint_dir"),
    "generate_opt_level": (always, "requests are always scheduled one by one"),
    "*additional*prompts": (always, "query_filter_config replaces dropped groups by new prompts"),
    "user_defined_rollout_loop_cls": (always, "async_training.rollouter_class names a class of your own"),
    "router_args": (always, "requests go to the engine with the fewest"),
    "rollout_mock": (always, "rollout_dump_dir writes the samples of every step"),
    "transfer_backend": (always, "batches are sent by Ray"),
    "*profiler_*": (always, "there is no profiler"),
    "report_length_and_rewards": (always, "lengths and scores are metrics"),
    "otlp_output_dir": (always, "there is no telemetry"),
    "save_logging_board_dir": (always, "trackers write to output_dir"),
    "is_offload_optimizer_states_in_train_step": (always, "is_offload_states moves all states between steps"),
    "enable_reference": (always, "the reference is used if use_kl_loss or add_token_level_kl is on"),
    "val_*_length": (always, "validation has the lengths of training"),
    "l2": (always, "weight_decay is the penalty of large weights"),
    "use_reward_scaling": (if_off, "reward_clip, norm_mean_type and norm_std_type change scores"),
    "use_reward_norm": (if_off, "norm_mean_type and norm_std_type normalize scores"),
    "add_len_reward": (if_off, "length_reward_coef and length_penalty_per_token change scores by length"),
    "error_max_len_clip": (if_off, "wrong answers are trained on whatever their length; set it to false"),
    "error_max_len_threshold": (always, "wrong answers are trained on whatever their length"),
    "rl_loss_coef": (lambda value: value == 1, "the policy loss has weight 1; leave it out"),
    "positive_loss_coef": (always, "topr_positive_weight is the weight of good responses"),
    "postive_loss_coef": (always, "topr_positive_weight is the weight of good responses"),
    "use_topr_*": (always, "actor_train.pg_variant chooses the loss"),
    "use_policy_loss_type": (always, "actor_train.pg_variant chooses the loss"),
    "minibatch_data_iter_num": (always, "ppo_epochs is the number of passes"),
    "balance_length": (always, "micro-batches are always balanced"),
    "dataset_filter": (always, "every row is read"),
    "vlm_filter": (always, "there are no images; prompts longer than prompt_length are left out"),
    "traj_save_dir": (always, "rollout_dump_dir has the texts of every step"),
    "val_greedy": (always, "validation.generating_args.temperature 0 is greedy"),
    "val_n_sample": (always, "validation.generating_args.num_return_sequences is the number of samples"),
    "mask_type": (always, "every response token is trained on"),
    "response_filter_config": (always, "query_filter_config drops groups"),
    "tag_to_template": (always, "one template serves all prompts: actor_train.data_args.template"),
    "dirty_data_mask": (always, "a row that cannot be read ends the run before it starts"),
    "open_feedback_turn": (always, "environments give the turns"),
    "use_token_reward": (always, "a score belongs to a whole response"),
    "global_scale_factor": (always, "correct_score and wrong_score are the scores"),
    "global_shift_value": (always, "correct_score and wrong_score are the scores"),
}
"""Key of a run -> which values are harmless, and why they have no effect."""

UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    UnsupportedKey("val_batch_size", always, "validation runs over the whole validation set", ("rlvr", "sft", "dpo")),
    UnsupportedKey("reward", always, "environments give the rewards", ("agentic",)),
    UnsupportedKey("reward", never, "this pipeline scores no response", ("sft", "dpo", "reward_model")),
    UnsupportedKey(
        "reward_model",
        always,
        "a reward model is the entry reward_model of `rewards` with the role `reward`: name it in "
        "reward.model_args.model_name_or_path",
    ),
    UnsupportedKey(
        "reward_pretrain",
        always,
        "no reward reads it; a reward model is the entry reward_model of `rewards`, named in "
        "reward.model_args.model_name_or_path",
        ("rlvr", "sft"),
    ),
    UnsupportedKey("reward_pretrain", always, "environments give the rewards", ("agentic",)),
    *(UnsupportedKey(key, harmless, reason) for key, (harmless, reason) in RUN_KEYS.items()),
    UnsupportedKey(
        "difficulty_loss_weight", if_off, "this pipeline scores no response", ("sft", "dpo", "reward_model")
    ),
    UnsupportedKey("length_loss_weight", if_off, "this pipeline generates no response", ("sft", "dpo", "reward_model")),
    UnsupportedKey("is_offload_states", always, "there is no engine to share devices with", pipelines=("sft",)),
    *AGENT_KEYS,
    *(UnsupportedKey(f"<role>.{key}", harmless, reason) for key, (harmless, reason) in ROLE_KEYS.items()),
    *(
        UnsupportedKey(f"<megatron role>.strategy_args.strategy_config.{key}", always, reason)
        for key, reason in MEGATRON_KEYS.items()
    ),
    *(
        UnsupportedKey(f"<megatron role>.strategy_args.strategy_config.{key}", harmless, reason)
        for key, (harmless, reason) in MEGATRON_VALUES.items()
    ),
    UnsupportedKey(
        "<megatron role>.strategy_args.strategy_config.optimizer",
        lambda value: str(value).startswith("adam"),
        "the optimizer is Adam; leave it out",
    ),
    *(
        UnsupportedKey(
            f"rewards.*.{key}",
            always,
            "a reward is a function, or the model of role reward or judge, without these options",
        )
        for key in REWARD_KEYS
    ),
    UnsupportedKey(
        "rewards.*.response_length_penalty_coef",
        always,
        "in ROLL one class reads it, and for the length of the padded response, which is the same for all; "
        "length_reward_coef and length_penalty_per_token change scores by length",
    ),
)
"""Keys without a counterpart; the first matching pattern applies."""
