"""Values that follow from others, filled in once after loading."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.configs.agentic_derive import derive_agentic
from roll.configs.errors import Problem
from roll.configs.layouts import ROLES
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.policy import proximal_source, ratio_base
from roll.configs.queue import max_staleness

PARITY_BOUND_FP32 = 1e-3
"""Both engines compute the same sums in another order: differences of a few 1e-6 are usual, 1e-3 means a fault."""

PARITY_BOUND_HALF = 0.5
"""One token's log-prob in 8 bits of mantissa can be off by some tenths; larger means another model or temperature."""


def derive(config: BaseConfig) -> list[Problem]:
    """Fills what the file left open; returns what cannot be filled in."""
    problems = derive_agentic(config) if isinstance(config, AgenticConfig) else _lengths(config)
    if problems:
        return problems
    config.logging_dir = config.logging_dir or str(Path(config.output_dir) / "logs")
    for role in ROLES:
        worker = getattr(config, role, None)
        if worker is not None and worker.model_args.model_name_or_path is None:
            worker.model_args.model_name_or_path = config.pretrain
    _inherit(config, "data_args", config.actor_train.data_args, skip=("file_name", "shuffle"))
    if isinstance(config, RLConfig):
        _derive_rl(config)
    return []


def _lengths(config: BaseConfig) -> list[Problem]:
    """prompt_length + response_length = sequence_length, whichever two are given."""
    prompt, response, sequence = config.prompt_length, config.response_length, config.sequence_length
    if response is None and sequence is None:
        return [Problem("response_length", "is not given; write response_length, the longest response in tokens")]
    if response is None and sequence is not None:
        if sequence <= prompt:
            advice = f"leaves no room for a response after prompt_length {prompt}; use more than {prompt}"
            return [Problem("sequence_length", f"{sequence} {advice}")]
        response = sequence - prompt
    if sequence is not None and response is not None and sequence != prompt + response:
        total = f"prompt_length {prompt} + response_length {response} = {prompt + response}"
        return [Problem("sequence_length", f"{sequence} is not {total}; leave sequence_length out")]
    assert response is not None
    config.response_length = response
    config.sequence_length = prompt + response
    return []


def _derive_rl(config: RLConfig) -> None:
    sampling = config.actor_infer.generating_args
    if sampling.max_new_tokens is None:
        sampling.max_new_tokens = config.response_length
    if sampling.num_return_sequences is None:
        sampling.num_return_sequences = config.num_return_sequences_in_group
    _inherit(config, "generating_args", sampling, skip=("num_return_sequences",))
    if config.validation.generating_args.num_return_sequences is None:
        config.validation.generating_args.num_return_sequences = 1
    if config.async_training.max_staleness_allowed is None:
        config.async_training.max_staleness_allowed = max_staleness(config)
    _derive_policy(config)
    if config.log_prob_parity_bound is None:
        dtypes = {config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype}
        config.log_prob_parity_bound = PARITY_BOUND_FP32 if dtypes == {"fp32"} else PARITY_BOUND_HALF


def _derive_policy(config: RLConfig) -> None:
    """Settles which policies the loss compares, and the weights that decoupled_ppo is made of."""
    variant, weights = config.actor_train.pg_variant, config.correction.weights
    if variant == "decoupled_ppo" and weights.level is None:
        weights.level = "token"
    source = proximal_source(config, variant, config.async_generation_ratio)
    config.old_log_probs_source = source  # type: ignore[assignment]
    config.pg_ratio_base = ratio_base(config, variant, source)  # type: ignore[assignment]


def _inherit(config: BaseConfig, section: str, training: Any, skip: tuple[str, ...]) -> None:
    """Gives validation the training's value of every key of the section that the file does not set."""
    target = getattr(config.validation, section)
    given = set(config.source.given)
    for item in fields(target):
        if item.name not in skip and f"validation.{section}.{item.name}" not in given:
            setattr(target, item.name, getattr(training, item.name))
