"""Megatron's options, under its own names: their defaults on each platform, and how pipeline stages share the layers.

Every option here reaches `TransformerConfig`, `DistributedDataParallelConfig` or `OptimizerConfig` of Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from roll.base.errors import Finding, error, warning
from roll.base.schema import Condition, needs, one_or_many, option
from roll.base.text import either

if TYPE_CHECKING:
    from roll.configs.arguments import MegatronModelArguments

Dtype = Literal["fp32", "bf16", "fp16"]

RECOMPUTED_MODULES = ("core_attn", "mlp")
"""Values of `recompute_modules` that these models have."""

WITHOUT_EFFECT = {
    "layernorm": "norms are part of the linear after them",
    **dict.fromkeys(("moe", "moe_act", "shared_experts", "mla_up_proj"), "the model families here are dense"),
}
"""Megatron's other values, and why they save nothing here."""

LAYER_SPLITS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options that split the layers over pipeline stages in another way than evenly."""

PRECISION_AWARE = Condition(
    lambda config, section: section.precision_aware and not section.optimizer_cpu_offload,
    "only use_precision_aware_optimizer without optimizer_cpu_offload, which computes in fp32, reads it",
    (".use_precision_aware_optimizer", ".optimizer_cpu_offload"),
    is_error=True,
)
CPU_OFFLOAD = needs("optimizer_cpu_offload", "optimizer_cpu_offload is false")
FULL = needs("recompute_granularity", "only recompute_granularity: full reads it", lambda value: value == "full")
SELECTIVE = needs(
    "recompute_granularity", "only recompute_granularity: selective reads it", lambda value: value == "selective"
)
SEVERAL_CONTEXT_RANKS = needs("context_parallel_size", "context_parallel_size is 1", lambda size: size > 1)
SEVERAL_STAGES = needs("pipeline_model_parallel_size", "pipeline_model_parallel_size is 1", lambda size: size > 1)


def _modules(value: Any) -> Any:
    """A list of Megatron's module names, also of a text with commas; of null, Megatron's default.

    Raises:
        ValueError: a name is none of them.
    """
    listed = value.replace(" ", "").split(",") if isinstance(value, str) else value
    names = ["core_attn"] if value is None else one_or_many(listed)
    unknown = [name for name in names if name not in (*RECOMPUTED_MODULES, *WITHOUT_EFFECT)]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join((*RECOMPUTED_MODULES, *WITHOUT_EFFECT))}")
    return names


@dataclass
class MegatronConfig:
    """`strategy_config` of megatron_infer, and what megatron_train shares with it."""

    tensor_model_parallel_size: int = option(1, "Ranks one layer is split over.", ge=1)
    pipeline_model_parallel_size: int = option(1, "Stages the layers are split into.", ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        None,
        "Parts of one pipeline stage, which take turns in the interleaved schedule; default: one.",
        ge=1,
        only_for=SEVERAL_STAGES,
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        None, "Layers of the first stage, where stages differ.", ge=1, only_for=SEVERAL_STAGES
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        None, "Layers of the last stage, where stages differ.", ge=1, only_for=SEVERAL_STAGES
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False, "Count the embedding as a layer, so that the first stage has one less.", only_for=SEVERAL_STAGES
    )
    account_for_loss_in_pipeline_split: bool = option(
        False, "Count the output head as a layer, so that the last stage has one less.", only_for=SEVERAL_STAGES
    )
    expert_model_parallel_size: int = option(1, "Ranks that the experts of a mixture are split over.", ge=1)
    expert_tensor_parallel_size: int | None = option(
        None, "Ranks that one expert is split over; default: tensor_model_parallel_size.", ge=1
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = option(
        "alltoall", "How tokens reach the ranks of their experts."
    )
    moe_grouped_gemm: bool | None = option(
        None,
        "Compute all experts of a rank in one call (cuda with Transformer Engine only); default: true where "
        "Transformer Engine computes the layers.",
    )
    context_parallel_size: int = option(
        1, "Ranks each sequence is split over, so that one rank keeps the activations of a part of it.", ge=1
    )
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = option(
        None,
        "How attention exchanges keys and values under context parallelism: p2p and a2a are those of Transformer "
        "Engine, all_gather that of torch's attention; default: p2p with Transformer Engine, else all_gather.",
        only_for=SEVERAL_CONTEXT_RANKS,
    )
    sequence_parallel: bool = option(
        False, "Split norms and residuals along the sequence over the tensor-parallel ranks."
    )
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = option(
        "auto", "Attention kernel of Transformer Engine (cuda only)."
    )
    bias_activation_fusion: bool | None = option(
        None, "Fused kernel for the MLP's activation (cuda only); default: true on cuda."
    )
    bias_dropout_fusion: bool | None = option(
        None, "Fused kernel for the addition of the residual (cuda only); default: true on cuda."
    )
    apply_rope_fusion: bool | None = option(
        None,
        "Fused kernel for the rotary embedding (cuda with Transformer Engine only); default: true where Transformer "
        "Engine computes the layers.",
    )


@dataclass
class MegatronTrainConfig(MegatronConfig):
    """`strategy_config` of megatron_train."""

    use_distributed_optimizer: bool = option(True, "Shard fp32 weights and Adam state over data-parallel ranks.")
    overlap_grad_reduce: bool | None = option(
        None,
        "Reduce gradients while the backward pass runs; default: true on cuda with several data-parallel ranks, and "
        "with overlap_param_gather.",
    )
    overlap_param_gather: bool | None = option(
        None,
        "Gather the weights of the distributed optimizer while the next optimizer step's forward pass runs; default: "
        "as overlap_grad_reduce.",
    )
    gradient_accumulation_fusion: bool | None = option(
        None,
        "Add weight gradients to their fp32 sum within the matrix product (cuda only); default: true where Apex with "
        "this kernel is installed.",
    )
    accumulate_allreduce_grads_in_fp32: bool = option(True, "Keep and reduce gradients in fp32.")
    moe_aux_loss_coeff: float = option(
        0.0, "Weight of the loss that balances experts in each layer of a mixture; 0 is off.", ge=0, usual=(0, 1)
    )
    moe_z_loss_coeff: float | None = option(
        None, "Weight of the loss that keeps the logits of routers small; default: off.", gt=0, usual=(0, 1)
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        None, "Recompute activations in the backward pass: of whole layers, or of recompute_modules."
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None,
        "Recompute groups of recompute_num_layers layers from their first input (uniform), or that many layers of a "
        "stage and keep the activations of the others (block); default: uniform.",
        only_for=FULL,
    )
    recompute_num_layers: int | None = option(
        None, "Layers of a group (uniform) or of a stage (block); default: 1.", ge=1, only_for=FULL
    )
    recompute_modules: list[str] = option(
        factory=lambda: ["core_attn"],
        parse=_modules,
        help="Parts of each layer that are recomputed: core_attn, mlp.",
        only_for=SELECTIVE,
    )
    use_precision_aware_optimizer: bool | None = option(
        None,
        "Adam with weights and moments in the dtypes below (cuda with Transformer Engine only); default: as "
        "optimizer_cpu_offload.",
    )
    main_params_dtype: Literal["fp32", "fp16"] = option("fp32", "Adam's copy of the weights.", only_for=PRECISION_AWARE)
    exp_avg_dtype: Dtype = option("fp32", "Adam's first moment.", only_for=PRECISION_AWARE)
    exp_avg_sq_dtype: Dtype = option("fp32", "Adam's second moment.", only_for=PRECISION_AWARE)
    optimizer_cpu_offload: bool = option(
        False, "Keep Adam's state in host memory, and step on the host's cores (cuda with Transformer Engine only)."
    )
    optimizer_offload_fraction: float = option(
        1.0, "Share of the parameters whose state is in host memory.", ge=0, le=1, only_for=CPU_OFFLOAD
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        True, "Copy gradients and weights of one parameter while others step.", only_for=CPU_OFFLOAD
    )

    @property
    def precision_aware(self) -> bool:
        """Whether Adam is Megatron's with `use_precision_aware_optimizer`."""
        chosen = self.use_precision_aware_optimizer
        return self.optimizer_cpu_offload if chosen is None else chosen


Options = TypeVar("Options", bound=MegatronConfig)


def with_defaults(
    options: Options, on_gpu: bool, data_ranks: int, transformer_engine: bool, gradient_kernel: bool
) -> Options:
    """`options` with a value for each that was left to the platform.

    `gradient_kernel` says whether Apex's kernel for `gradient_accumulation_fusion` is installed.
    """
    values: dict[str, Any] = {
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": transformer_engine,
        "cp_comm_type": "p2p" if transformer_engine else "all_gather",
        "moe_grouped_gemm": transformer_engine,
    }
    if isinstance(options, MegatronTrainConfig):
        overlap = options.overlap_grad_reduce
        if overlap is None:
            overlap = bool(options.overlap_param_gather) or (on_gpu and data_ranks > 1)
        values |= {
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap and options.use_distributed_optimizer,
            "gradient_accumulation_fusion": on_gpu and gradient_kernel,
            "use_precision_aware_optimizer": options.precision_aware,
        }
    return replace(options, **{name: value for name, value in values.items() if getattr(options, name) is None})


def virtual_stages(options: MegatronConfig) -> int | None:
    """Parts of each pipeline stage, or None for Megatron's schedule without them."""
    several = options.pipeline_model_parallel_size > 1 and (options.virtual_pipeline_model_parallel_size or 1) > 1
    return options.virtual_pipeline_model_parallel_size if several else None


def part_layers(layers: int, options: MegatronConfig) -> list[list[int]]:
    """The number of layers of each pipeline stage's parts: one part, or its virtual stages.

    Raises:
        ValueError: the layers cannot be split like this; the message begins with the key to change.
    """
    stages, virtual = options.pipeline_model_parallel_size, virtual_stages(options) or 1
    if stages == 1:
        return [[layers]]
    first, last = options.num_layers_in_first_pipeline_stage, options.num_layers_in_last_pipeline_stage
    embedding, loss = options.account_for_embedding_in_pipeline_split, options.account_for_loss_in_pipeline_split
    if (first or last) and (embedding or loss):
        raise ValueError(
            f"{'num_layers_in_first_pipeline_stage' if first else 'num_layers_in_last_pipeline_stage'}: excludes "
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split; keep one of them"
        )
    counted = layers + embedding + loss - (first or 0) - (last or 0)
    middle = stages - bool(first) - bool(last)
    if middle < 0 or counted < 0 or (middle == 0) != (counted == 0) or (middle and counted % middle):
        raise ValueError(_uneven(layers, counted, middle, options))
    split = [*([first] if first else []), *[counted // middle if middle else 0] * middle, *([last] if last else [])]
    if any(size % virtual for size in split):
        raise ValueError(
            f"virtual_pipeline_model_parallel_size: {virtual} does not divide the layers of the stages, {split}; "
            f"use {either(_common_divisors(split))}"
        )
    parts = [[size // virtual] * virtual for size in split]
    parts[0][0] -= embedding
    parts[-1][-1] -= loss
    if min(map(min, parts)) < 1:
        raise ValueError(f"pipeline_model_parallel_size: {stages} stages leave a part of {parts} without a layer")
    return parts


def stage_layers(layers: int, options: MegatronConfig) -> list[int]:
    """The number of layers of each pipeline stage; errors as `part_layers`."""
    return [sum(parts) for parts in part_layers(layers, options)]


def check_recompute(layers: int, options: MegatronTrainConfig) -> None:
    """Checks that groups of `recompute_num_layers` layers fill every part of a stage, without which Megatron fails.

    Raises:
        ValueError: they do not; the message begins with the key to change.
    """
    if options.recompute_granularity != "full" or options.recompute_method == "block":
        return
    group = options.recompute_num_layers or 1
    sizes = sorted({size for parts in part_layers(layers, options) for size in parts})
    if any(size % group for size in sizes):
        raise ValueError(
            f"recompute_num_layers: groups of {group} do not fill stages of {either(sizes)} layers; "
            f"use {either(_common_divisors(sizes))}, or recompute_method: block"
        )


def _uneven(layers: int, counted: int, middle: int, options: MegatronConfig) -> str:
    stages = options.pipeline_model_parallel_size
    if middle == stages and counted == layers:
        fitting = either([size for size in range(1, layers + 1) if layers % size == 0])
        return f"pipeline_model_parallel_size: {stages} does not divide the model's {layers} layers; use {fitting}"
    added = options.account_for_embedding_in_pipeline_split or options.account_for_loss_in_pipeline_split
    rest = f"{counted} of the model's {layers} layers" + (
        " (account_for_..._in_pipeline_split included)" if added else ""
    )
    first, last = options.num_layers_in_first_pipeline_stage or 0, options.num_layers_in_last_pipeline_stage or 0
    if middle <= 0 or counted < 0:
        key = "num_layers_in_last_pipeline_stage" if last else "num_layers_in_first_pipeline_stage"
        fitting = f"; use {layers - first}" if last and 0 < first < layers and middle == 0 else ""
        return (
            f"{key}: {first + last} layers in {stages - middle} of {stages} stages, and the model has {layers}{fitting}"
        )
    both = "account_for_embedding_in_pipeline_split: true and account_for_loss_in_pipeline_split: true"
    alone = options.account_for_embedding_in_pipeline_split != options.account_for_loss_in_pipeline_split
    hint = f"; use {both}" if alone and (counted + 1) % middle == 0 else ""
    what = f"the {middle} stages without a number of their own" if middle < stages else f"{stages} stages"
    return f"pipeline_model_parallel_size: {what} cannot share {rest} evenly{hint}"


def _common_divisors(numbers: list[int]) -> list[int]:
    return [size for size in range(1, min(numbers) + 1) if not any(number % size for number in numbers)]


def ineffective_modules(options: MegatronTrainConfig) -> Iterator[str]:
    """A sentence for each of `recompute_modules` that saves nothing."""
    if options.recompute_granularity == "selective":
        yield from (f"{name}: {WITHOUT_EFFECT[name]}" for name in options.recompute_modules if name in WITHOUT_EFFECT)


CUDA_ONLY = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "gradient_accumulation_fusion",
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
)
"""Megatron options that need a GPU."""


def check_megatron(path: str, options: MegatronConfig, model: MegatronModelArguments) -> Iterator[Finding]:
    """Options of `strategy_config`, at `path`, fit each other and the model, on any platform."""
    if options.sequence_parallel and options.tensor_model_parallel_size == 1:
        yield error(
            f"{path}.sequence_parallel",
            "true splits the sequence over tensor-parallel ranks, and there is one; set it to false, or "
            "tensor_model_parallel_size to 2 or more",
        )
    if isinstance(options, MegatronTrainConfig):
        yield from _check_recompute(options, path, model)
        yield from _check_optimizer(options, path, model)


def _check_exchange(path: str, options: MegatronConfig, on_cpu: bool, without_engine: bool) -> Iterator[Finding]:
    """The attention that computes has the chosen exchange of keys and values."""
    chosen = options.cp_comm_type
    if options.context_parallel_size == 1 or chosen is None or (chosen == "all_gather") == without_engine:
        return
    if chosen == "all_gather":
        yield error(path, "all_gather is that of torch's attention, and Transformer Engine computes; leave it out")
    elif on_cpu:
        yield error(path, f"{chosen} needs platform cuda with Transformer Engine; leave it out")
    else:
        yield error(
            path,
            f"{chosen} needs Transformer Engine, which computes neither fp32 nor attn_implementation sdpa; "
            "leave it out",
        )


def check_kernels(role: str, options: MegatronConfig, model: MegatronModelArguments, on_cpu: bool) -> Iterator[Finding]:
    """The platform has the kernels that options and precision ask for."""
    path, attention = f"{role}.strategy_args.strategy_config", f"{role}.model_args.attn_implementation"
    if model.dtype == "fp16":
        yield error(f"{role}.model_args.dtype", "fp16 needs loss scaling, which is not available; use bf16 or fp32")
    without_engine = on_cpu or model.attn_implementation == "sdpa" or model.dtype == "fp32"
    yield from _check_exchange(f"{path}.cp_comm_type", options, on_cpu, without_engine)
    if on_cpu:
        for name in CUDA_ONLY:
            if getattr(options, name, False):
                yield error(f"{path}.{name}", "true needs a GPU, and platform is cpu; set it to false")
        if options.attention_backend != "auto":
            yield error(
                f"{path}.attention_backend", f"{options.attention_backend} needs a GPU, and platform is cpu; use auto"
            )
        if model.attn_implementation == "fa2":
            yield error(attention, "fa2 needs a GPU, and platform is cpu; use auto or sdpa")
        return
    for name in ("apply_rope_fusion", "moe_grouped_gemm"):
        if getattr(options, name) and without_engine:
            yield error(
                f"{path}.{name}",
                "true needs Transformer Engine, which computes neither fp32 nor attn_implementation sdpa; leave it out",
            )
    if options.attention_backend != "auto" and without_engine:
        reason = "attn_implementation sdpa" if model.attn_implementation == "sdpa" else "dtype fp32"
        yield warning(f"{path}.attention_backend", f"has no effect: with {reason} torch's attention computes")
    if model.attn_implementation == "fa2" and model.dtype == "fp32":
        yield warning(attention, "fa2 has no fp32: torch's attention computes instead")


def _check_recompute(options: MegatronTrainConfig, path: str, model: MegatronModelArguments) -> Iterator[Finding]:
    recompute = options.recompute_granularity
    if recompute == "selective" and not options.recompute_modules:
        yield error(f"{path}.recompute_modules", "is empty, so nothing is recomputed; use [core_attn]")
    if getattr(model, "disable_gradient_checkpointing", False) and recompute is not None:
        yield error(
            f"{path}.recompute_granularity",
            f"{recompute} contradicts model_args.disable_gradient_checkpointing: true; keep one of them",
        )


def _check_optimizer(options: MegatronTrainConfig, path: str, model: MegatronModelArguments) -> Iterator[Finding]:
    if options.optimizer_cpu_offload and model.dtype == "fp32":
        yield error(
            f"{path}.optimizer_cpu_offload", "true cannot be resumed with model_args.dtype fp32; use bf16, or false"
        )
    for name in ("overlap_param_gather", "use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(options, name) and not options.use_distributed_optimizer:
            yield error(
                f"{path}.{name}", "true needs use_distributed_optimizer: true; set that, or leave this option out"
            )
    if options.overlap_param_gather and options.overlap_grad_reduce is False:
        yield error(
            f"{path}.overlap_param_gather",
            "true needs overlap_grad_reduce: true, as in Megatron; set that, or leave this option out",
        )
    if options.optimizer_cpu_offload and options.use_precision_aware_optimizer is False:
        yield error(
            f"{path}.use_precision_aware_optimizer",
            "false contradicts optimizer_cpu_offload: true, which Megatron implements in that optimizer; leave it out",
        )
    for sentence in ineffective_modules(options):
        yield warning(f"{path}.recompute_modules", f"has no effect for {sentence}")
