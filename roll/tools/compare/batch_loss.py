"""The loss of one batch at its first optimizer step, and the norm of its gradient: of log-probs, and of weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossScale
from roll.algorithms.losses import LOSSES
from roll.algorithms.options.policy_options import PolicySettings, known_losses
from roll.configs.pipeline import LearnerOptions
from roll.datasets.batch import Batch
from roll.distributed.process_groups import hold_port, release_port

MICRO_BATCH = 8
"""Samples of a forward and backward pass."""


@dataclass(frozen=True)
class BatchLoss:
    """The loss with one `loss_agg_mode`, and the Euclidean norm of d loss / d log pi over all tokens."""

    mode: str
    loss: float
    log_prob_gradient: float


def first_step_settings(settings: PolicySettings, tensors: Mapping[str, Tensor]) -> tuple[PolicySettings, list[str]]:
    """The settings without the terms whose inputs a dump lacks, and what was left out."""
    left_out = ["entropy_loss_coef, as the dump has no entropy"] if settings.entropy_loss_coef else []
    no_reference = settings.use_kl_loss and "ref_log_probs" not in tensors
    if no_reference:
        left_out.append("use_kl_loss, as the dump has no log-probs of the reference")
    choosing = [loss.name for loss in known_losses(settings.pg_variant) if loss.choose is not None]
    left_out += [f"the tokens that pg_variant {name} chooses at random or by covariance" for name in choosing]
    if settings.correction.renormalize:
        left_out.append("correction.renormalize, so that rejected tokens are counted")
    use_kl_loss = settings.use_kl_loss and not no_reference
    return replace(settings, first_step=True, entropy_loss_coef=0.0, use_kl_loss=use_kl_loss), left_out


def batch_losses(tensors: Mapping[str, Tensor], settings: PolicySettings, length: int) -> Iterator[BatchLoss]:
    """For each `loss_agg_mode`.

    The policy is the one of `old_log_probs`, or else of the log-probs of the engine, or else any: the ratio is 1 then.

    Args:
        tensors: [B, T] `response_mask`, `advantages`, and log-probs that are known.
        settings: of `first_step_settings`.
        length: the divisor of `seq-mean-token-sum-norm`.
    """
    mask = tensors["response_mask"]
    for mode in LOSS_AGG_MODES:
        log_probs = _policy(tensors).clone().requires_grad_()
        micro = _complete(tensors)
        scale = LossScale.of(mask, length)
        loss, _ = LOSSES["policy"](log_probs, None, micro, scale, replace(settings, loss_agg_mode=cast(Any, mode)))
        loss.backward()
        assert log_probs.grad is not None
        yield BatchLoss(mode, float(loss.detach()), float(log_probs.grad.norm()))


def _policy(tensors: Mapping[str, Tensor]) -> Tensor:
    known = (tensors[name] for name in ("old_log_probs", "behavior_log_probs") if name in tensors)
    return next(known, torch.zeros_like(tensors["advantages"]))


def _complete(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With log-probs of the engine and the chosen tokens, where the dump has none."""
    names = ("advantages", "response_mask", "old_log_probs", "behavior_log_probs", "ref_log_probs")
    found = {name: tensors[name] for name in names if name in tensors}
    none = torch.zeros_like(found["response_mask"])
    policy = _policy(tensors)
    return {"old_log_probs": policy, "behavior_log_probs": policy, "high_covariance": none} | found


@dataclass(frozen=True)
class WeightGradient:
    """Of the model in `pretrain`: its loss, the norm of the gradient of its weights, its log-probs [B, T]."""

    loss: float
    norm: float
    log_probs: Tensor


def weight_gradient(config: LearnerOptions, tensors: Mapping[str, Tensor], settings: PolicySettings) -> WeightGradient:
    """One forward and backward pass of the trainer in this process, on the CPU in fp32.

    `tensors` have the ids of prompts and responses too.

    Raises:
        UnsupportedModel, ValueError: the model is not one that is trained here, or is not on this machine.
    """
    from roll.configs.devices.megatron import MegatronTrainConfig
    from roll.configs.devices.parallel_layout import ParallelLayout
    from roll.platforms import get_platform
    from roll.platforms.platform import LOOPBACK

    platform = get_platform("cpu")
    platform.prepare_megatron()
    from roll.distributed.train.megatron_strategy import MegatronTrainStrategy

    role = copy.deepcopy(config.actor_train)
    role.model_args.dtype = "fp32"
    role.strategy_args.strategy_config = MegatronTrainConfig(use_distributed_optimizer=False)
    port = hold_port(LOOPBACK)
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    strategy = MegatronTrainStrategy(role, config, ParallelLayout(), 0, platform, "actor_train")
    try:
        strategy.initialize()
        rows = range(len(tensors["response_mask"]))
        micro_batches = [list(rows[start : start + MICRO_BATCH]) for start in rows[::MICRO_BATCH]]
        temperature = config.actor_infer.generating_args.temperature
        data = Batch(
            _complete(tensors) | {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
        )
        data.meta_info = {"temperature": temperature, "micro_batches": micro_batches}
        log_probs = strategy.compute_log_probs(data).batch["log_probs"]
        step = {"micro_batches": micro_batches, **_counts(tensors["response_mask"])}
        unknown = [name for name in ("old_log_probs", "behavior_log_probs") if name not in tensors]
        data = data.adding({name: log_probs for name in unknown})
        data.meta_info |= {"loss": "policy", "loss_config": settings, "optimizer_steps": [step]}
        metrics, _ = strategy.forward_backward(data)
        return WeightGradient(metrics["loss"], strategy.optimizer_step(0.0, 0.0)["grad_norm"], log_probs)
    finally:
        strategy.shutdown()
        release_port(port)


def _counts(mask: Tensor) -> dict[str, float]:
    return {"tokens": float(mask.sum()), "sequences": float(mask.any(-1).sum())}
