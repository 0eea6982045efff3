"""Keys that other recipes of this field carry and this project does not have: each is answered, none is skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from roll.configs.aliases import Tree
from roll.configs.errors import Problem


def _always(value: Any) -> bool:
    return True


def _never(value: Any) -> bool:
    return False


def _off(value: Any) -> bool:
    return not value


@dataclass(frozen=True)
class ForeignKey:
    """A key by pattern; harmless values are dropped with a warning, others are errors. `reason` says what to do.

    `pipelines` are those that do not have it.
    """

    pattern: str
    harmless: Callable[[Any], bool]
    reason: str
    pipelines: tuple[str, ...] = ("rlvr", "sft", "agentic")


AGENTS = (
    ForeignKey("*_env_manager.format_penalty", _never, "write env_config.format_penalty of the entries in custom_envs"),
    ForeignKey("train_env_manager.generating_args", _never, "write actor_infer.generating_args"),
    ForeignKey("val_env_manager.generating_args", _never, "write validation.generating_args"),
    ForeignKey("*_env_manager.world_size", _always, "processes follow from max_env_num_per_worker"),
    ForeignKey("*_env_manager.group_filter_cls", _off, "every complete group is trained on; leave it out"),
    ForeignKey(
        "*_env_manager.llm_proxy",
        lambda value: isinstance(value, dict) and value.get("proxy_type") == "policy",
        "actions are always the policy's; leave it out",
    ),
    ForeignKey("custom_env", _never, "write the entries themselves under custom_envs; remove the section"),
    ForeignKey("custom_envs.*.use_thread_lock", _always, "environments share no state"),
    ForeignKey("custom_envs.*.max_env_step_concurrent", _off, "lower num_env_groups to have fewer steps at a time"),
    ForeignKey("custom_envs.*.history_length", _never, "a turn is told all earlier ones; leave it out"),
    ForeignKey("custom_envs.*.tool_wrapper", _never, "tools are the environment's own; see env_type calculator"),
    ForeignKey(
        "env_monitor",
        lambda value: isinstance(value, dict) and bool(value.get("enable", True)),
        "every wait has a deadline: env_step_timeout_s, trajectory_timeout_s; remove the section",
    ),
    ForeignKey("partial_gpu_mode", _off, "roles share all their devices or none; set it to false"),
    ForeignKey("render_save_dir", _off, "write rollout_dump_dir for the texts of every step"),
)
"""Keys of recipes for agents."""

FOREIGN: tuple[ForeignKey, ...] = (
    ForeignKey("hydra", _always, "configuration is not read by Hydra; remove the section"),
    ForeignKey("num_nodes", _always, "nodes follow from device_mapping and num_devices_per_node"),
    ForeignKey("val_batch_size", _always, "validation runs over the whole validation set", ("rlvr", "sft")),
    ForeignKey("checkpoint_config", _never, "checkpoints are written to output_dir/checkpoints; remove the section"),
    ForeignKey("generate_opt_level", _always, "requests are always scheduled one by one"),
    ForeignKey("enable_reference", _off, "the reference is used when use_kl_loss or add_token_level_kl is on"),
    ForeignKey("enable_old_logprobs_recompute", _off, "write old_log_probs_source: recompute"),
    ForeignKey("force_disable_old_logprobs_recompute", _off, "write old_log_probs_source: behavior"),
    *(
        ForeignKey(pattern, bool, "engines always return log-probs; whether they are used: old_log_probs_source")
        for pattern in ("calculate_log_probs", "*.calculate_log_probs")
    ),
    *(
        ForeignKey(pattern, _off, "engines keep their memory between steps; set it to false")
        for pattern in ("free_cache_engine", "*.free_cache_engine")
    ),
    ForeignKey("pg_clip", _never, "write pg_clip_low and pg_clip_high"),
    ForeignKey("value_clip", _always, "there is no critic"),
    ForeignKey("lambd", _always, "no advantage estimator here uses it"),
    ForeignKey("critic", _never, "there is no critic; remove the section"),
    ForeignKey("reward", _never, "environments give the rewards; remove the section", ("agentic",)),
    ForeignKey("reward", _never, "rewards are rules; describe them under `rewards`", ("rlvr", "sft")),
    *AGENTS,
    ForeignKey("max_len_mask", _off, "responses cut at their length are trained on like others; set it to false"),
    ForeignKey("difficulty_mask", _off, "prompts are not filtered by difficulty; set it to false"),
    ForeignKey("difficulty_low_threshold", _always, "prompts are not filtered by difficulty"),
    ForeignKey("difficulty_high_threshold", _always, "prompts are not filtered by difficulty"),
    ForeignKey("difficulty_loss_weight", _off, "the loss is not weighted by difficulty; set it to false"),
    ForeignKey("length_loss_weight", _off, "the loss is not weighted by length; choose loss_agg_mode instead"),
    ForeignKey("error_max_len_clip", _off, "scores are not changed by length; set it to false"),
    ForeignKey("error_max_len_threshold", _always, "scores are not changed by length"),
    ForeignKey("rl_loss_coef", lambda value: value == 1, "the policy loss has weight 1"),
    ForeignKey("is_offload_states", _off, "a role keeps its memory; set it to false"),
    ForeignKey("model_download_type", _off, "models are folders on disk; download the model and name its folder"),
    ForeignKey("tag_to_template", _off, "one template serves all prompts: actor_train.data_args.template"),
    ForeignKey("global_template", _off, "write actor_train.data_args.template"),
    ForeignKey(
        "*.worker_cls", _always, "workers follow from strategy_name, losses from pg_variant, rewards from function"
    ),
    ForeignKey("*.data_args.preprocessing_num_workers", _always, "prompts are prepared in one process"),
    ForeignKey(
        "*.data_args.domain_interleave_probs",
        lambda value: isinstance(value, dict) and len(value) == 1,
        "prompts are drawn in one order, not by domain; mix the files instead",
    ),
    ForeignKey("*.data_args.dataset_type", _always, "the file's ending says its type"),
    ForeignKey("*.model_args.model_type", _off, "the type follows from the model's config.json"),
    ForeignKey("*.training_args.num_train_epochs", _always, "max_steps says how long the run is"),
    ForeignKey("*.training_args.dataloader_num_workers", _always, "there is no data loader"),
    ForeignKey(
        "*.generating_args.do_sample", bool, "responses are always sampled; use validation temperature 0 for greedy"
    ),
    ForeignKey("*.backend_timeout", _always, "start_timeout_s and rpc_timeout_s bound every wait"),
    ForeignKey("*.use_sequence_packing", _off, "samples are not packed; use dynamic batching by tokens"),
    ForeignKey("*.strategy_args.strategy_config.moe_*", _always, "the model families here are dense"),
    ForeignKey("rewards.*.infer_batch_size", _always, "rewards score one sample at a time"),
    ForeignKey("rewards.*.reward_type", _always, "the rule returns the score"),
)
"""What is known about keys that stand in other projects' recipes."""


OPAQUE = ("env_config",)
"""Sections whose keys are those of a class of someone's own."""


def drop_foreign(tree: Tree, pipeline: str, path: str = "") -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree of a pipeline without foreign keys, notes on the harmless ones, and problems for the others."""
    kept: Tree = {}
    notes: list[Problem] = []
    problems: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        foreign = _known(where, pipeline)
        if foreign is None and isinstance(value, dict) and key not in OPAQUE:
            kept[key], inner_notes, inner_problems = drop_foreign(value, pipeline, where)
            notes += inner_notes
            problems += inner_problems
        elif foreign is None:
            kept[key] = value
        elif foreign.harmless(value):
            notes.append(Problem(where, f"has no effect: {foreign.reason}"))
        else:
            problems.append(Problem(where, f"{_shown(value)} is not available: {foreign.reason}"))
    return kept, notes, problems


def _known(path: str, pipeline: str) -> ForeignKey | None:
    return next((item for item in FOREIGN if pipeline in item.pipelines and fnmatchcase(path, item.pattern)), None)


def _shown(value: Any) -> str:
    return "this section" if isinstance(value, dict) else str(value)
