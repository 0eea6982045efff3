"""Which keys of a role have an effect, and which known keys have none in a given configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from roll.configs.effects_agentic import AGENTIC
from roll.configs.inert import Inert
from roll.configs.names import GROUP_ESTIMATORS
from roll.configs.policy import VARIANT_KNOBS
from roll.configs.queue import runs_in_background

ROLE_KEYS: dict[str, tuple[str, ...]] = {
    "actor_train": (
        "model_args",
        "training_args",
        "data_args",
        "strategy_args",
        "device_mapping",
        "num_gpus_per_worker",
        "infer_batch_size",
        "use_dynamic_batching_*",
        "max_tokens_per_microbatch_*",
        "pg_variant",
        "system_envs",
    ),
    "actor_infer": (
        "model_args.model_name_or_path",
        "model_args.dtype",
        "generating_args",
        "strategy_args",
        "device_mapping",
        "num_gpus_per_worker",
        "max_running_requests",
        "generation_timeout_s",
        "system_envs",
    ),
    "reference": (
        "model_args.model_name_or_path",
        "model_args.dtype",
        "model_args.attn_implementation",
        "strategy_args",
        "device_mapping",
        "num_gpus_per_worker",
        "infer_batch_size",
        "use_dynamic_batching_in_infer",
        "max_tokens_per_microbatch_in_infer",
        "system_envs",
    ),
    "validation": ("data_args", "generating_args"),
}
"""What each role reads; a prefix stands for everything below it."""

MISLEADING = (
    "validation.device_mapping",
    "validation.strategy_args.*",
    "actor_train.generating_args.*",
    "*.pg_variant",
)
"""Keys without effect that would make a reader believe in something that does not happen: errors, not warnings."""

ELSEWHERE = {
    "actor_train.generating_args.*": "training samples are drawn by actor_infer.generating_args",
    "actor_infer.data_args.*": "prompts are read by actor_train.data_args",
    "actor_infer.infer_batch_size": "the engine forms its own batches; max_running_requests bounds them",
    "actor_infer.model_args.*": "the engine chooses its own kernels",
    "validation.device_mapping": "validation generates on actor_infer's devices",
    "validation.strategy_args.*": "validation generates with actor_infer's engine",
    "*.pg_variant": "only actor_train has a policy loss",
    "*.training_args.*": "only actor_train has an optimizer",
}
"""Pattern -> where the effect lies instead."""


TRAINING_OPTIONS = (
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "recompute_granularity",
    "accumulate_allreduce_grads_in_fp32",
)
"""Megatron options that act on gradients alone."""


def role_reads(path: str) -> bool:
    """Whether a dotted path is read by its role; true for paths of no role."""
    role, _, rest = path.partition(".")
    if role not in ROLE_KEYS or not rest:
        return True
    return any(fnmatchcase(rest, prefix) or fnmatchcase(rest, f"{prefix}.*") for prefix in ROLE_KEYS[role])


def _is_sft(config: Any) -> bool:
    return config.pipeline == "sft"


def _rl(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda config: config.pipeline in ("rlvr", "agentic") and test(config)


def _uses_kl(config: Any) -> bool:
    return config.use_kl_loss or config.add_token_level_kl


def _filters(config: Any) -> bool:
    return config.pipeline == "rlvr" and any(
        reward.query_filter_config.type != "no_filter" for reward in config.rewards.values()
    )


def _variant_knobs() -> Iterator[Inert]:
    """The knobs of a policy loss mislead wherever another one is in use."""

    def unused(variants: tuple[str, ...]) -> Callable[[Any], bool]:
        return _rl(lambda config: config.actor_train.pg_variant not in variants)

    for key, variants in VARIANT_KNOBS.items():
        reason = f"it belongs to actor_train.pg_variant {' or '.join(variants)}"
        yield Inert((key,), unused(variants), reason, misleads=True)


INERT: tuple[Inert, ...] = (
    *AGENTIC,
    Inert(("reward_pretrain",), _rl(lambda c: True), "rule rewards have no model"),
    Inert(("kl_loss_coef",), _rl(lambda c: not c.use_kl_loss), "use_kl_loss is false; set it to true", misleads=True),
    Inert(
        ("init_kl_coef", "target_kl"),
        _rl(lambda c: not c.add_token_level_kl),
        "add_token_level_kl is false; set it to true",
        misleads=True,
    ),
    Inert(("kl_horizon",), _rl(lambda c: c.target_kl is None), "target_kl is null, so the weight of the KL is fixed"),
    Inert(("kl_penalty",), _rl(lambda c: not _uses_kl(c)), "neither use_kl_loss nor add_token_level_kl is on"),
    Inert(("grpo_norm_by_std",), _rl(lambda c: c.adv_estimator != "grpo"), "adv_estimator is not grpo", misleads=True),
    Inert(
        ("norm_mean_type", "norm_std_type"),
        _rl(lambda c: c.adv_estimator != "reinforce"),
        "only adv_estimator reinforce reads it; the others normalise in a way of their own",
        misleads=True,
    ),
    Inert(
        ("gamma",),
        _rl(lambda c: c.adv_estimator in GROUP_ESTIMATORS),
        "this adv_estimator gives every token of a response the same advantage",
    ),
    Inert(
        ("whiten_advantages",),
        _rl(lambda c: c.adv_estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")),
        "this adv_estimator whitens its advantages anyway",
    ),
    *_variant_knobs(),
    Inert(
        ("correction.weights.mode", "correction.weights.lower", "correction.weights.upper"),
        _rl(lambda c: not c.correction.weighted),
        "correction.weights.level is null; set it to token, sequence or geometric",
        misleads=True,
    ),
    Inert(
        ("correction.rejection.level", "correction.rejection.lower", "correction.rejection.upper"),
        _rl(lambda c: c.correction.rejection.statistic is None),
        "correction.rejection.statistic is null; set it to k1, k2 or k3",
        misleads=True,
    ),
    Inert(
        ("correction.renormalize",),
        _rl(lambda c: not c.correction.rejects),
        "nothing is rejected; set correction.rejection, correction.veto_threshold or correction.weights.mode: mask",
        misleads=True,
    ),
    Inert(
        ("allow_uncorrected_off_policy",),
        _rl(lambda c: c.async_generation_ratio == 0),
        "async_generation_ratio is 0, so samples are never stale",
    ),
    Inert(
        ("in_flight_policy",),
        _rl(lambda c: c.async_generation_ratio == 0),
        "async_generation_ratio is 0, so no request runs when weights are published",
    ),
    Inert(
        ("async_training.staleness_threshold", "async_training.max_staleness_allowed"),
        _rl(lambda c: c.async_generation_ratio == 0),
        "async_generation_ratio is 0, so samples are never stale",
    ),
    Inert(
        ("async_training.max_queue_size",),
        _rl(lambda c: c.async_generation_ratio == 0),
        "async_generation_ratio is 0, so there is never more than one batch",
    ),
    Inert(
        ("async_training.batch_generation_interval_s",),
        _rl(lambda c: not runs_in_background(c)),
        "each batch is generated when it is asked for; set async_generation_ratio or async_training.rollouter: actor",
    ),
    Inert(("max_resample_factor",), _rl(lambda c: not _filters(c)), "every query_filter_config is of type no_filter"),
    Inert(("dual_clip_c",), _rl(lambda c: not c.dual_clip_loss), "dual_clip_loss is false"),
    Inert(
        (
            "model_update_buffer_size_mb",
            "sync_timeout_s",
            "max_sync_retries",
            "sync_retry_delay_s",
            "verify_weights",
            "validation.generating_args.*",
        ),
        _is_sft,
        "supervised fine-tuning generates nothing and publishes no weights",
    ),
    Inert(("actor_train.pg_variant",), _is_sft, "supervised fine-tuning has no policy loss", misleads=True),
    Inert(("*.data_args.tag", "*.data_args.ground_truth"), _is_sft, "supervised fine-tuning scores no response"),
    Inert(
        ("actor_train.infer_batch_size", "actor_train.*_in_infer"),
        lambda c: _is_sft(c) and c.eval_steps == 0,
        "eval_steps is 0, and only validation makes forward passes by themselves",
    ),
    Inert(("sync_retry_delay_s",), lambda c: c.max_sync_retries == 0, "max_sync_retries is 0"),
    Inert(("logging_steps",), lambda c: not c.track_with, "track_with is empty, and metrics.jsonl has every step"),
    Inert(
        ("actor_train.training_args.min_learning_rate",),
        lambda c: c.actor_train.training_args.lr_scheduler_type == "constant",
        "lr_scheduler_type is constant; use linear or cosine",
    ),
    Inert(("max_ckpt_to_keep",), lambda c: not c.save_checkpoint, "save_checkpoint is false"),
    Inert(("save_steps",), lambda c: not c.save_checkpoint, "save_checkpoint is false", misleads=True),
    Inert(
        ("reference.*",),
        _rl(lambda c: not _uses_kl(c) and not c.reference.device_mapping),
        "neither use_kl_loss nor add_token_level_kl is on, so there is no reference",
    ),
    Inert(
        tuple(f"reference.strategy_args.strategy_config.{key}" for key in TRAINING_OPTIONS),
        _rl(_uses_kl),
        "the reference is not trained",
    ),
    Inert(("validation.*",), lambda c: c.eval_steps == 0, "eval_steps is 0, so nothing is validated"),
    Inert(("validation.data_args.shuffle",), lambda c: True, "validation runs over all of its data"),
    Inert(
        ("actor_train.max_tokens_per_microbatch_in_train",),
        lambda c: not c.actor_train.use_dynamic_batching_in_train,
        "use_dynamic_batching_in_train is false",
    ),
    Inert(
        ("actor_train.max_tokens_per_microbatch_in_infer",),
        lambda c: not c.actor_train.use_dynamic_batching_in_infer,
        "use_dynamic_batching_in_infer is false",
    ),
    Inert(
        ("reference.max_tokens_per_microbatch_in_infer",),
        _rl(lambda c: not c.reference.use_dynamic_batching_in_infer),
        "use_dynamic_batching_in_infer is false",
    ),
    Inert(
        ("actor_train.infer_batch_size",),
        lambda c: c.actor_train.use_dynamic_batching_in_infer,
        "use_dynamic_batching_in_infer forms forward micro-batches by tokens",
    ),
)
"""Known keys that have no effect in some configurations."""
