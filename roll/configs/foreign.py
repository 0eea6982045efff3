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
    """A key by pattern; harmless values are dropped with a warning, others are errors. `reason` says what to do."""

    pattern: str
    harmless: Callable[[Any], bool]
    reason: str


FOREIGN: tuple[ForeignKey, ...] = (
    ForeignKey("hydra", _always, "configuration is not read by Hydra; remove the section"),
    ForeignKey("num_nodes", _always, "nodes follow from device_mapping and num_devices_per_node"),
    ForeignKey("val_batch_size", _always, "validation runs over the whole validation set"),
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
    ForeignKey("reward", _never, "rewards are rules; describe them under `rewards`"),
    ForeignKey("custom_envs", _never, "there are no environments; the pipelines are rlvr and sft"),
    ForeignKey("*_env_manager", _never, "there are no environments; the pipelines are rlvr and sft"),
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


def drop_foreign(tree: Tree, path: str = "") -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree without foreign keys, notes on the harmless ones, and problems for the others."""
    kept: Tree = {}
    notes: list[Problem] = []
    problems: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        foreign = next((item for item in FOREIGN if fnmatchcase(where, item.pattern)), None)
        if foreign is None and isinstance(value, dict):
            kept[key], inner_notes, inner_problems = drop_foreign(value, where)
            notes += inner_notes
            problems += inner_problems
        elif foreign is None:
            kept[key] = value
        elif foreign.harmless(value):
            notes.append(Problem(where, f"has no effect: {foreign.reason}"))
        else:
            problems.append(Problem(where, f"{_shown(value)} is not available: {foreign.reason}"))
    return kept, notes, problems


def _shown(value: Any) -> str:
    return "this section" if isinstance(value, dict) else str(value)
