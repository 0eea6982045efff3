"""Checks of a mixture of experts: the experts fit the ranks, and options of experts have some to act on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll.base.errors import Finding, error, warning
from roll.base.text import either
from roll.configs.pipeline import BaseConfig, RLConfig
from roll.configs.roles import ActorTrainConfig, MegatronRoleConfig, TrainedRoleConfig
from roll.models.families.mixture import Mixture
from roll.models.families.shape import ModelShape

EXPERT_OPTIONS = ("expert_tensor_parallel_size", "moe_token_dispatcher_type", "moe_grouped_gemm")
"""Options of `strategy_config` without effect in a dense model."""

LOSSES_OF_ROUTERS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Further ones of a trained role."""


def check_experts(config: BaseConfig, role: str, worker: MegatronRoleConfig, shape: ModelShape) -> Iterator[Finding]:
    """The options of a role for experts fit the model, which `shape` describes."""
    if shape.mixture is None:
        yield from _check_dense(config, role, worker)
    else:
        yield from _check_sizes(role, worker, shape.mixture)
        if shape.tied and isinstance(config, RLConfig) and worker is config.actor_train:
            yield error(
                f"{role}.model_args.model_name_or_path",
                "tie_word_embeddings: true, which SGLang does not read of a mixture; use a model with a head",
            )
        yield from _check_replay(config, worker)


def _check_dense(config: BaseConfig, role: str, worker: MegatronRoleConfig) -> Iterator[Finding]:
    path, options = f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config
    name = worker.model_args.model_name_or_path
    if options.expert_model_parallel_size > 1:
        yield error(
            f"{path}.expert_model_parallel_size",
            f"{options.expert_model_parallel_size}, but {name} has no experts; use 1",
        )
    if isinstance(worker, ActorTrainConfig) and worker.router_replay.replays:
        yield error(f"{role}.router_replay", f"has no effect: {name} has no experts; leave it out")
    for key in (*EXPERT_OPTIONS, *(LOSSES_OF_ROUTERS if isinstance(worker, TrainedRoleConfig) else ())):
        if f"{path}.{key}" in config.source.given:
            yield warning(f"{path}.{key}", f"has no effect: {name} has no experts; leave it out")


def _check_sizes(role: str, worker: MegatronRoleConfig, mixture: Mixture) -> Iterator[Finding]:
    path, options, layout = f"{role}.strategy_args.strategy_config", worker.strategy_args.strategy_config, worker.layout
    ranks, tensor = layout.expert, layout.expert_ranks // layout.expert
    if mixture.experts % ranks:
        fitting = either(_divisors(mixture.experts))
        yield error(
            f"{path}.expert_model_parallel_size", f"{ranks} does not divide {mixture.experts} experts; use {fitting}"
        )
    if mixture.width % tensor:
        key = "expert_tensor" if options.expert_tensor_parallel_size else "tensor_model"
        yield error(f"{path}.{key}_parallel_size", f"{tensor} does not divide the {mixture.width} columns of an expert")
    if options.context_parallel_size > 1:
        yield error(f"{path}.context_parallel_size", "is not available for a mixture of experts; use 1")
    count, tensor_ranks = len(worker.device_mapping), layout.model_size
    if not layout.expert_copies and count % tensor_ranks == 0:
        size, stages = layout.expert_ranks * layout.pipeline, f" x pipeline parallel {layout.pipeline}"
        sizes = f"expert tensor parallel {tensor} x expert parallel {ranks}{stages if layout.pipeline > 1 else ''}"
        yield error(
            f"{role}.device_mapping", f"{count} devices cannot hold {sizes}; use {math.lcm(size, tensor_ranks)}"
        )
    if isinstance(worker, TrainedRoleConfig) and layout.tensor > 1 and not options.sequence_parallel:
        yield error(
            f"{path}.sequence_parallel",
            f"false with tensor parallel {layout.tensor} in a mixture of experts; set it to true",
        )


def _check_replay(config: BaseConfig, worker: MegatronRoleConfig) -> Iterator[Finding]:
    """The engine can return the experts of each token, or there is a pass that chooses them."""
    if not (isinstance(config, RLConfig) and isinstance(worker, ActorTrainConfig)):
        return
    if worker.router_replay.pass_records and config.old_log_probs_source == "behavior":
        yield error(
            "actor_train.router_replay.mode",
            "R2 needs a pass of the old log-probs; use R3, or set old_log_probs_source to recompute",
        )
    if not worker.router_replay.engine_records:
        return
    backend = config.actor_infer.strategy_args.strategy_config.get("moe_a2a_backend", "none")
    if backend != "none":
        yield error(
            "actor_infer.strategy_args.strategy_config.moe_a2a_backend",
            f"{backend} returns no experts for router_replay; use none",
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
