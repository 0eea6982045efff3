"""Keys of ROLL that differ from ours."""

from __future__ import annotations

from roll.configs.compat import Names, UnsupportedKey, always, if_off, never

NAMES: Names = {"train_infer_correction": "correction", "world_size": "<role>.device_mapping"}

RENAMED_KEYS = {"num_gpus_per_node": "num_devices_per_node", "rpc_timeout": "rpc_timeout_s"}

MOVED_KEYS = {"env_monitor.hung_timeout": "trajectory_timeout_s"}

AGENT_KEYS = (
    UnsupportedKey(
        "*_env_manager.format_penalty", never, "write env_config.format_penalty of the entries in custom_envs"
    ),
    UnsupportedKey("train_env_manager.generating_args", never, "write actor_infer.generating_args"),
    UnsupportedKey("val_env_manager.generating_args", never, "write validation.generating_args"),
    UnsupportedKey("*_env_manager.world_size", always, "processes follow from max_env_num_per_worker"),
    UnsupportedKey("*_env_manager.group_filter_cls", if_off, "every complete group is trained on; leave it out"),
    UnsupportedKey(
        "*_env_manager.llm_proxy",
        lambda value: isinstance(value, dict) and value.get("proxy_type") == "policy",
        "actions are always the policy's; leave it out",
    ),
    UnsupportedKey("custom_env", never, "write the entries themselves under custom_envs; remove the section"),
    UnsupportedKey("custom_envs.*.use_thread_lock", always, "environments share no state"),
    UnsupportedKey(
        "custom_envs.*.max_env_step_concurrent", if_off, "lower num_env_groups to run fewer steps at a time"
    ),
    UnsupportedKey("custom_envs.*.history_length", never, "every turn sees all earlier turns; leave it out"),
    UnsupportedKey("custom_envs.*.tool_wrapper", never, "tools are the environment's own; see env_type calculator"),
    UnsupportedKey(
        "env_monitor",
        lambda value: isinstance(value, dict) and bool(value.get("enable", True)),
        "every wait has a deadline: env_step_timeout_s, trajectory_timeout_s; remove the section",
    ),
    UnsupportedKey("partial_gpu_mode", if_off, "roles share all their devices or none; set it to false"),
    UnsupportedKey("render_save_dir", if_off, "write rollout_dump_dir for the texts of every step"),
)
"""Keys of recipes for agents."""

UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    UnsupportedKey("hydra", always, "configuration is not read by Hydra; remove the section"),
    UnsupportedKey("num_nodes", always, "nodes follow from device_mapping and num_devices_per_node"),
    UnsupportedKey("val_batch_size", always, "validation runs over the whole validation set", ("rlvr", "sft")),
    UnsupportedKey("checkpoint_config", never, "checkpoints are written to output_dir/checkpoints; remove the section"),
    UnsupportedKey("generate_opt_level", always, "requests are always scheduled one by one"),
    UnsupportedKey("enable_reference", if_off, "the reference is used if use_kl_loss or add_token_level_kl is on"),
    UnsupportedKey("enable_old_logprobs_recompute", if_off, "write old_log_probs_source: recompute"),
    UnsupportedKey("force_disable_old_logprobs_recompute", if_off, "write old_log_probs_source: behavior"),
    UnsupportedKey("pg_clip", never, "write pg_clip_low and pg_clip_high"),
    UnsupportedKey("value_clip", always, "there is no critic"),
    UnsupportedKey("lambd", always, "no advantage estimator of this project uses it"),
    UnsupportedKey("critic", never, "there is no critic; remove the section"),
    UnsupportedKey("reward", never, "environments give the rewards; remove the section", ("agentic",)),
    UnsupportedKey("reward", never, "rewards are rules; describe them under `rewards`", ("rlvr", "sft")),
    *AGENT_KEYS,
    UnsupportedKey("reward_pretrain", always, "rule rewards have no model", ("rlvr", "sft")),
    UnsupportedKey("reward_pretrain", always, "environments give the rewards", ("agentic",)),
    UnsupportedKey("max_len_mask", if_off, "responses cut at their length are trained on like others; set it to false"),
    UnsupportedKey("difficulty_mask", if_off, "prompts are not filtered by difficulty; set it to false"),
    UnsupportedKey("difficulty_low_threshold", always, "prompts are not filtered by difficulty"),
    UnsupportedKey("difficulty_high_threshold", always, "prompts are not filtered by difficulty"),
    UnsupportedKey("difficulty_loss_weight", if_off, "the loss is not weighted by difficulty; set it to false"),
    UnsupportedKey("length_loss_weight", if_off, "the loss is not weighted by length; choose loss_agg_mode instead"),
    UnsupportedKey("error_max_len_clip", if_off, "scores are not changed by length; set it to false"),
    UnsupportedKey("error_max_len_threshold", always, "scores are not changed by length"),
    UnsupportedKey("rl_loss_coef", lambda value: value == 1, "the policy loss has weight 1"),
    UnsupportedKey("is_offload_states", if_off, "a role keeps its memory; set it to false"),
    UnsupportedKey("tag_to_template", if_off, "one template serves all prompts: actor_train.data_args.template"),
    UnsupportedKey("global_template", if_off, "write actor_train.data_args.template"),
    UnsupportedKey(
        "*.worker_cls", always, "workers follow from strategy_name, losses from pg_variant, rewards from function"
    ),
    UnsupportedKey("*.data_args.preprocessing_num_workers", always, "prompts are prepared in one process"),
    UnsupportedKey(
        "*.data_args.domain_interleave_probs",
        lambda value: isinstance(value, dict) and len(value) == 1,
        "prompts are drawn in one order, not by domain; mix the files instead",
    ),
    UnsupportedKey("*.data_args.dataset_type", always, "the type follows from the file's ending"),
    UnsupportedKey("*.model_args.model_type", if_off, "the type follows from the model's config.json"),
    UnsupportedKey("*.training_args.num_train_epochs", always, "max_steps sets the length of the run"),
    UnsupportedKey("*.training_args.dataloader_num_workers", always, "there is no data loader"),
    UnsupportedKey(
        "*.generating_args.do_sample", bool, "responses are always sampled; use validation temperature 0 for greedy"
    ),
    UnsupportedKey("*.backend_timeout", always, "start_timeout_s and rpc_timeout_s bound every wait"),
    UnsupportedKey("*.use_sequence_packing", if_off, "samples are not packed; use dynamic batching by tokens"),
    UnsupportedKey("*.strategy_args.strategy_config.moe_*", always, "the model families here are dense"),
    UnsupportedKey("rewards.*.infer_batch_size", always, "rewards score one sample at a time"),
    UnsupportedKey("rewards.*.reward_type", always, "the rule returns the score"),
)
"""Keys without a counterpart; the first matching pattern applies."""
