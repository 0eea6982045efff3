"""What the families of mixtures of experts share: the numbers of the experts, and the names of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.models.families.decoder import LAYER
from roll.models.families.layouts import GatedPair, InputSplit, Replicated
from roll.models.families.weights import WeightRule


@dataclass(frozen=True)
class Mixture:
    """The experts of a model.

    Attributes:
        experts: of each sparse layer.
        per_token: experts that compute a token.
        width: intermediate size of one expert.
        sparse: for each layer, whether it has experts; other layers have the MLP of a dense model.
        normalised: the weights of a token's experts sum to 1; else they are their shares in the softmax of all.
        shared_width: intermediate size of the expert that computes every token; 0: there is none.
    """

    experts: int
    per_token: int
    width: int
    sparse: tuple[bool, ...]
    normalised: bool = True
    shared_width: int = 0


@dataclass(frozen=True)
class ExpertPlace:
    """Which experts a rank has, and which part of each.

    Attributes:
        rank, ranks: the experts are split over `ranks`, evenly and in order.
        tensor_rank, tensor_ranks: each of them is split over `tensor_ranks`.
        copy: which of the equal copies of its part the rank has.
    """

    rank: int = 0
    ranks: int = 1
    tensor_rank: int = 0
    tensor_ranks: int = 1
    copy: int = 0

    def numbers(self, experts: int) -> range:
        """The experts of the rank, of `experts` in all."""
        each = experts // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)


def qwen_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Qwen's mixtures; transformers 5 writes `num_local_experts` in place of `num_experts`."""
    return {**raw, "num_experts": raw.get("num_experts", raw.get("num_local_experts"))}


def qwen_mixture(settings: Mapping[str, Any]) -> Mixture:
    """The experts of Qwen's mixtures."""
    layers, step = settings["num_hidden_layers"], settings.get("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers") or ()
    return Mixture(
        experts=settings["num_experts"],
        per_token=settings["num_experts_per_tok"],
        width=settings["moe_intermediate_size"],
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        normalised=settings.get("norm_topk_prob", False),
        shared_width=settings.get("shared_expert_intermediate_size", 0),
    )


QWEN_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

QWEN_SMALL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
"""Sizes of a small model."""

ATTENTION = tuple(rule for rule in LAYER if not rule.megatron.startswith("mlp."))
"""Weights of a layer of llama before its MLP."""

NORM = WeightRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Replicated(), ("hidden",))

ROUTER = WeightRule("mlp.router.weight", ("mlp.gate.weight",), Replicated(), ("experts", "hidden"))

EXPERT = (
    WeightRule(
        "mlp.experts.linear_fc1.weight",
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        GatedPair(),
        ("expert_gate_and_up", "hidden"),
        engine="mlp.experts.w13_weight",
        is_expert=True,
    ),
    WeightRule(
        "mlp.experts.linear_fc2.weight",
        ("mlp.experts.{}.down_proj.weight",),
        InputSplit(),
        ("hidden", "expert_width"),
        engine="mlp.experts.w2_weight",
        is_expert=True,
    ),
)
"""Weights of one expert; SGLang stacks those of all experts of a layer in one parameter."""

SPARSE_LAYER = (*ATTENTION, NORM, ROUTER, *EXPERT)
"""Weights of a layer with experts."""
