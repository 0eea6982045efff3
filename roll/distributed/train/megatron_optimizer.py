"""Megatron's data-parallel wrapper and optimizer, set up so that gradients are sums."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from roll.configs.arguments import TORCH_DTYPES, TrainingArguments, TrainModelArguments
from roll.configs.devices.megatron import MegatronTrainConfig
from roll.distributed.train.learning_rate import LearningRate
from roll.distributed.train.megatron_model import HiddenStateModel, transformer_engine_available

if TYPE_CHECKING:
    from roll.distributed.train.megatron_forward import ForwardPass
    from roll.distributed.train.megatron_weights import MegatronWeights
    from roll.models.lora import Adapters


@dataclass
class TrainedPolicy:
    """A policy of one rank.

    Attributes:
        model: what is trained; of several policies each with its own adapters.
        adapters: of each virtual stage; none where all weights are trained.
        wrapped: the stages with gradient buffers of this policy.
        optimizer: of this policy alone.
        forward: passes through the stages that fill these buffers.
        weights: of this stage under their HF names, with these adapters.
        schedule: of the learning rate, by `optimizer_steps`.
        no_sync: Megatron's functions that delay the reduction of the gradients.
        optimizer_steps: taken so far.
        has_gradients: whether `forward_backward` has added gradients that no optimizer step has used.
    """

    model: TrainModelArguments
    adapters: Sequence[Adapters]
    wrapped: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    forward: ForwardPass
    weights: MegatronWeights
    schedule: LearningRate
    no_sync: Any
    optimizer_steps: int = 0
    has_gradients: bool = False

    def place(self, stages: Sequence[HiddenStateModel]) -> None:
        """Makes this the policy that the stages compute."""
        for stage, adapters in zip(stages, self.adapters, strict=False):
            adapters.place(stage)
        stages[0].config.no_sync_func = self.no_sync


class NonFiniteError(RuntimeError):
    """A loss or a gradient became infinite or not a number."""


def wrap_model(stages: Sequence[HiddenStateModel], megatron: MegatronTrainConfig) -> list[DistributedDataParallel]:
    """The virtual stages of a rank, each with gradient buffers that are summed over data ranks.

    Only the first is cut into buckets that are reduced one by one: its gradients are the last to be ready.
    """
    config = stages[0].config
    wrapped = [
        DistributedDataParallel(config, ddp_config(megatron), stage, disable_bucketing=number > 0)
        for number, stage in enumerate(stages)
    ]
    config.finalize_model_grads_func = _finalize_sums
    no_sync = [each.no_sync for each in wrapped] if megatron.overlap_grad_reduce else None
    config.no_sync_func = no_sync[0] if no_sync and len(no_sync) == 1 else no_sync
    config.grad_scale_func = None
    return wrapped


def ddp_config(megatron: MegatronTrainConfig) -> DistributedDataParallelConfig:
    """Megatron's options of data parallelism."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        grad_reduce_in_fp32=megatron.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=bool(megatron.overlap_grad_reduce),
        overlap_param_gather=bool(megatron.overlap_param_gather),
    )


def optimizer_config(
    arguments: TrainingArguments, megatron: MegatronTrainConfig, dtype: torch.dtype, pinned: bool
) -> OptimizerConfig:
    """Megatron's options of Adam; `pinned` is the host memory of `optimizer_cpu_offload`."""
    given = megatron.use_precision_aware_optimizer
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    dtypes = {name: getattr(torch, TORCH_DTYPES[getattr(megatron, name)]) for name in names} if given else {}
    return OptimizerConfig(
        optimizer="adam",
        lr=arguments.learning_rate,
        min_lr=arguments.min_learning_rate,
        weight_decay=arguments.weight_decay,
        adam_beta1=arguments.adam_beta1,
        adam_beta2=arguments.adam_beta2,
        adam_eps=arguments.adam_epsilon,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
        overlap_param_gather=bool(megatron.overlap_param_gather),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_precision_aware_optimizer=bool(given),
        optimizer_cpu_offload=megatron.optimizer_cpu_offload,
        optimizer_offload_fraction=megatron.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=megatron.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=pinned,
        pin_cpu_params=pinned,
        **dtypes,
    )


def build_optimizer(
    wrapped: Sequence[DistributedDataParallel], arguments: TrainingArguments, megatron: MegatronTrainConfig
) -> MegatronOptimizer:
    """AdamW with decoupled weight decay on matrices (norms and biases have none).

    Raises:
        ValueError: fp16, which would need loss scaling and skipped steps; or Transformer Engine is missing.
    """
    dtype = wrapped[0].module.config.params_dtype
    on_cpu = next(wrapped[0].parameters()).device.type == "cpu"
    if dtype == torch.float16:
        raise ValueError("actor_train.model_args.dtype: fp16 cannot be trained; use bf16 or fp32")
    if megatron.use_precision_aware_optimizer and not transformer_engine_available():
        name = "optimizer_cpu_offload" if megatron.optimizer_cpu_offload else "use_precision_aware_optimizer"
        raise ValueError(f"{name}: true needs Transformer Engine, which is not installed; install it, or use false")
    optimizer = get_megatron_optimizer(
        optimizer_config(arguments, megatron, dtype, pinned=not on_cpu),
        list(wrapped),
        use_gloo_process_groups=not on_cpu,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = arguments.weight_decay * group["wd_mult"]
        if on_cpu:
            group["fused"], group["foreach"] = True, False
    return optimizer


@contextlib.contextmanager
def unreduced(wrapped: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Backward passes in the block add to the gradients of this rank alone; `reduce_gradients` sums over ranks.

    A reduction in each pass would sum what earlier passes have summed once more.
    """
    config = wrapped[0].module.config
    functions = config.finalize_model_grads_func, config.no_sync_func
    config.finalize_model_grads_func, config.no_sync_func = (lambda *_, **__: None), None
    try:
        with contextlib.ExitStack() as blocks:
            for each in wrapped:
                blocks.enter_context(each.no_sync())
            yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func = functions


def reduce_gradients(wrapped: Sequence[DistributedDataParallel]) -> None:
    """Sums gradients over data ranks, and those of parameters that several ranks have, as Megatron's schedule does."""
    for each in wrapped:
        if each.ddp_config.overlap_grad_reduce:  # else it starts where it is waited for
            each.start_grad_sync()
    _finalize_sums([*wrapped])


@torch.no_grad()
def forget_moments(optimizer: MegatronOptimizer) -> None:
    """Sets Adam's moments and step counts to 0, as before the first step."""
    for inner in (part.optimizer for part in parts(optimizer)):
        for state in inner.state.values():
            for name in {"exp_avg", "exp_avg_sq", "step"} & state.keys():
                state[name].zero_()
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = 0


def update(optimizer: MegatronOptimizer, learning_rate: float, max_grad_norm: float, step: int) -> float:
    """Takes an optimizer step with gradients clipped to `max_grad_norm` (0: not clipped); their norm before clipping.

    Raises:
        NonFiniteError: the norm is not finite; the message names the step, and the weights are untouched.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    require_finite("gradient norm", norm, step)
    for part in parts(optimizer):
        parameters = part.get_parameters()
        if parameters and max_grad_norm:
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, max_grad_norm, norm, decoupled)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step_with_ready_grads()
    return norm


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers inside Megatron's chain: one for a dense model."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def require_finite(what: str, value: float, step: int) -> None:
    """Stops before the weights are touched.

    Raises:
        NonFiniteError: `value` is not finite; the message names the step.
    """
    if not math.isfinite(value):
        raise NonFiniteError(f"optimizer step {step}: the {what} is {value}; the weights are those of the step before")


def _finalize_sums(model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's reductions without its division by a token count: the loss carries its own denominators."""
    finalize_model_grads(model, None, **options)
