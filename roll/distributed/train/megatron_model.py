"""Builds the Megatron model of a pipeline stage, of one part or of several virtual stages."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from roll.configs.devices.megatron import (
    RECOMPUTED_MODULES,
    MegatronConfig,
    MegatronTrainConfig,
    stage_layers,
    virtual_stages,
)
from roll.models.families.layouts import padded_vocabulary
from roll.models.families.mixture import ExpertPlace
from roll.models.families.shape import ModelShape, RotaryConfig
from roll.models.gathered_tokens import gather_uneven_tokens
from roll.models.hf_import import rules_of
from roll.models.operators import RotaryTable, rotary_frequencies

if TYPE_CHECKING:
    from roll.models.local_spec import LayerRotary

logger = logging.getLogger(__name__)

UNKNOWN_POSITIONS = 2048
"""Longest sequence that Megatron expects of a model whose config.json gives none."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a Megatron model that do not follow from the HF config."""

    megatron: MegatronConfig = field(default_factory=MegatronTrainConfig)
    """As `with_defaults` returns them."""
    dtype: torch.dtype = torch.float32
    transformer_engine: bool = False
    deterministic: bool = False
    """Operators that add in a fixed order on a GPU."""


class HiddenStateModel(GPTModel):  # type: ignore[misc]  # Megatron is not typed
    """A GPT whose last stage returns hidden states [S, B, H], and leaves the head to the caller."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def head_weight(self) -> torch.Tensor:
        """This rank's rows of the output projection, [padded vocabulary / T, H]."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


class ValueHead(torch.nn.Module):
    """One value for each hidden state, computed in fp32; every tensor-parallel rank has all of it."""

    def __init__(self, config: TransformerConfig, bias: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **options)) if bias else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] to [N] float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class ValueModel(HiddenStateModel):
    """A GPT with a value head in place of the output projection."""

    def __init__(self, config: TransformerConfig, *args: Any, value_bias: bool, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(config, value_bias)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of a plain Megatron module: that of a language model expects an output projection."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, *args, **kwargs)
        return state


def build_gpt_model(model: ModelShape, options: BuildOptions) -> list[HiddenStateModel]:
    """This rank's virtual stages of the model, one without `virtual_pipeline_model_parallel_size`, on its device.

    Weights are not initialized: `hf_import.import_hf` loads them. Megatron's parallel state must be initialized.

    Raises:
        ValueError: the parallel sizes do not divide the model, or an option would have no effect.
    """
    _check_options(model, options)
    config = transformer_config(model, options)
    virtual = virtual_stages(options.megatron)
    return [_build_stage(model, options, config, part) for part in (range(virtual) if virtual else [None])]


def _build_stage(
    model: ModelShape, options: BuildOptions, config: TransformerConfig, part: int | None
) -> HiddenStateModel:
    """Virtual stage number `part` of this rank, or its only stage."""
    build = partial(ValueModel, value_bias=model.value_bias) if model.value_head else HiddenStateModel
    stage = build(
        config,
        _block_spec(model, config, options, part),
        vocab_size=padded_vocabulary(model.vocabulary, options.megatron.tensor_model_parallel_size),
        max_sequence_length=model.max_positions or UNKNOWN_POSITIONS,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part),
        position_embedding_type="rope" if options.transformer_engine else "none",
        share_embeddings_and_output_weights=model.tied,
        parallel_output=True,
        vp_stage=part,
    )
    if options.transformer_engine:
        stage.rotary_pos_emb.inv_freq = _frequencies(model)
    if stage.pre_process and model.family.traits.scaled_embedding:
        stage.embedding.register_forward_hook(lambda module, inputs, output: output * model.hidden**0.5)
    if model.mixture is not None:
        stage.to(torch.cuda.current_device())  # Megatron makes routers on the CPU
        _mark_experts(stage, options.megatron)
        gather_uneven_tokens(stage)
    return stage


def _mark_experts(stage: torch.nn.Module, megatron: MegatronConfig) -> None:
    """Has Megatron sum gradients of experts over all their copies.

    It takes experts that are not split over ranks for dense weights, whose copies are the data ranks; with another
    tensor-parallel size the ranks that hold an expert are others.
    """
    tensor = megatron.tensor_model_parallel_size
    if (megatron.expert_tensor_parallel_size or tensor) == tensor:
        return
    for name, parameter in stage.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def freeze(stage: HiddenStateModel, model: ModelShape, names: Collection[str], experts: ExpertPlace) -> None:
    """Weights of these names in a Hugging Face folder get no gradients, and so no state of an optimizer."""
    parameters = dict(stage.named_parameters())
    for rule in rules_of(stage, model, experts):
        if rule.hf[0] in names:
            parameters[rule.megatron].requires_grad_(False)
    recomputes = stage.config.recompute_granularity == "full"
    if stage.pre_process and recomputes and not any(each.requires_grad for each in stage.embedding.parameters()):
        # recomputation gives the weights of a layer no gradients where its input has none
        stage.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def transformer_config(model: ModelShape, options: BuildOptions) -> TransformerConfig:
    """Megatron's config of the model. `calculate_per_token_loss` makes it sum gradients instead of averaging."""
    megatron = options.megatron
    several = megatron.pipeline_model_parallel_size > 1
    virtual = virtual_stages(megatron)
    recompute: dict[str, Any] = {}
    if isinstance(megatron, MegatronTrainConfig) and megatron.recompute_granularity is not None:
        recompute["recompute_granularity"] = megatron.recompute_granularity
        if megatron.recompute_granularity == "full":
            recompute["recompute_method"] = megatron.recompute_method or "uniform"
            recompute["recompute_num_layers"] = megatron.recompute_num_layers or 1
        else:
            recompute["recompute_modules"] = [name for name in megatron.recompute_modules if name in RECOMPUTED_MODULES]
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.intermediate,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=not (options.transformer_engine or _fuses_activation(model, megatron)),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_leave_unset,
        output_layer_init_method=_leave_unset,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype == torch.bfloat16,
        fp16=options.dtype == torch.float16,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage if several else None,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage if several else None,
        account_for_embedding_in_pipeline_split=several and megatron.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=several and megatron.account_for_loss_in_pipeline_split,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        context_parallel_size=megatron.context_parallel_size,
        cp_comm_type=megatron.cp_comm_type if megatron.context_parallel_size > 1 else None,
        sequence_parallel=megatron.sequence_parallel,
        variable_seq_lengths=several,
        calculate_per_token_loss=True,
        softmax_scale=model.query_scale,
        attention_backend=AttnBackend[megatron.attention_backend],
        bias_activation_fusion=_fuses_activation(model, megatron),
        bias_dropout_fusion=bool(megatron.bias_dropout_fusion),
        apply_rope_fusion=bool(megatron.apply_rope_fusion),
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=isinstance(megatron, MegatronTrainConfig)
        and bool(megatron.gradient_accumulation_fusion),
        deterministic_mode=options.deterministic,
        **recompute,
        **_mixture_options(model, megatron),
        **model.family.megatron,
    )


def _fuses_activation(model: ModelShape, megatron: MegatronConfig) -> bool:
    """Megatron's fused kernel is that of SwiGLU."""
    return bool(megatron.bias_activation_fusion) and not model.family.traits.gelu


def _mixture_options(model: ModelShape, megatron: MegatronConfig) -> dict[str, Any]:
    """Options of experts; the dispatcher also of a dense model, since Megatron reads it with `variable_seq_lengths`."""
    options: dict[str, Any] = {"moe_token_dispatcher_type": megatron.moe_token_dispatcher_type}
    mixture = model.mixture
    if mixture is None:
        return options
    return options | {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.per_token,
        "moe_ffn_hidden_size": mixture.width,
        "moe_layer_freq": 1 if all(mixture.sparse) else [int(sparse) for sparse in mixture.sparse],
        "moe_shared_expert_intermediate_size": mixture.shared_width or None,
        "moe_shared_expert_gate": mixture.shared_width > 0,
        "moe_router_pre_softmax": not mixture.normalised,
        "moe_router_dtype": "fp32",
        **_router_losses(megatron),
        "moe_grouped_gemm": bool(megatron.moe_grouped_gemm),
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
    }


def _router_losses(megatron: MegatronConfig) -> dict[str, Any]:
    """`ExpertBalance` sets the coefficients of every optimizer step."""
    if not isinstance(megatron, MegatronTrainConfig):
        return {"moe_router_load_balancing_type": "none"}
    balanced = "aux_loss" if megatron.moe_aux_loss_coeff else "none"
    coefficients = {"moe_aux_loss_coeff": megatron.moe_aux_loss_coeff, "moe_z_loss_coeff": megatron.moe_z_loss_coeff}
    return {"moe_router_load_balancing_type": balanced, **coefficients}


def transformer_engine_available() -> bool:
    """Whether NVIDIA's Transformer Engine can be imported."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def gradient_kernel_available() -> bool:
    """Whether Apex's kernel is installed, which Megatron needs for `gradient_accumulation_fusion`."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _block_spec(
    model: ModelShape, config: TransformerConfig, options: BuildOptions, part: int | None
) -> TransformerBlockSubmodules:
    """Transformer Engine's layers, or those of `local_spec`; logs which of them is used."""
    layer: Callable[[int | None], ModuleSpec]
    if options.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        layer = partial(
            get_gpt_layer_with_transformer_engine_spec,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        norm, name = TENorm, "TE"
    else:
        from roll.models.local_spec import RMSNorm, local_layer_spec

        layer = partial(
            local_layer_spec, qk_norm=config.qk_layernorm, rotary=_rotary(model), traits=model.family.traits
        )
        norm, name = RMSNorm, "torch"
    first, layers = get_transformer_layer_offset(config, part), get_num_layers_to_build(config, vp_stage=part)
    logger.info("%s: %d of %d layers use the %s spec", model.architecture, layers, model.layers, name)
    sparse = model.mixture.sparse[first : first + layers] if model.mixture else [False] * layers
    specs = {kind: layer(model.experts if kind else None) for kind in set(sparse)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in sparse], layer_norm=norm)


def _rotary(model: ModelShape) -> list[LayerRotary]:
    """Of each layer; layers share tables."""
    from roll.models.local_spec import LayerRotary

    pairs, local = model.family.traits.rotary_pairs, model.local
    everywhere = LayerRotary(RotaryTable(_frequencies(model), pairs))
    if local is None:
        return [everywhere] * model.layers
    near = LayerRotary(RotaryTable(_frequencies(replace(model, rotary=RotaryConfig(local.base))), pairs), local.window)
    return [near if is_local else everywhere for is_local in local.layers]


def _frequencies(model: ModelShape) -> torch.Tensor:
    return rotary_frequencies(model.rotary, model.head_dim).to(torch.cuda.current_device())


def _check_options(model: ModelShape, options: BuildOptions) -> None:
    """Checks that parallel sizes divide the model and that no option is without effect."""
    megatron = options.megatron
    if megatron.apply_rope_fusion and not options.transformer_engine:
        raise ValueError("apply_rope_fusion: true needs Transformer Engine, which this role does not use")
    tensor = megatron.tensor_model_parallel_size
    stage_layers(model.layers, megatron)
    for name, size in (("attention heads", model.heads), ("FFN width", model.intermediate)):
        if size % tensor:
            raise ValueError(f"tensor_model_parallel_size: {tensor} does not divide the model's {size} {name}")
    if model.mixture is not None and model.experts % megatron.expert_model_parallel_size:
        raise ValueError(
            f"expert_model_parallel_size: {megatron.expert_model_parallel_size} does not divide {model.experts} experts"
        )
    if model.kv_heads % tensor and tensor % model.kv_heads:
        raise ValueError(
            f"tensor_model_parallel_size: {tensor} is neither a multiple nor a divisor of {model.kv_heads} KV heads"
        )
    rows = padded_vocabulary(model.vocabulary, tensor) // tensor
    if rows * (tensor - 1) >= model.vocabulary:
        raise ValueError(f"tensor_model_parallel_size: {tensor} leaves ranks without any of {model.vocabulary} tokens")


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    """Replaces random initialization, which would be wasted time because the weights are imported."""
    return weight
