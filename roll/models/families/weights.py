"""The weights of a model: their names in Megatron, Hugging Face folders, SGLang and GGUF files, and their shapes.

Weight updates, import, export, checksums, GGUF files and the estimates of memory all read these rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from roll.models.families.layouts import GroupedQKV, Layout, Replicated

if TYPE_CHECKING:
    from roll.models.families.shape import ModelShape


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter, and the tensors that it is made of elsewhere.

    Attributes:
        megatron: name of the parameter.
        hf: names of its tensors in a Hugging Face folder.
        layout: how these make the parameter, and how it is split over ranks.
        size: shape of the whole parameter, in numbers and in names of those of `ModelShape`.
        engine: SGLang's parameter of all tensors together; empty: each is one under its own name.
        gguf: names of the tensors in a GGUF file.
        is_copy: of a weight of another stage; imported, but not sent or exported.
        is_expert: one of each expert of a layer, whose number stands for `{}` in `hf`; a rank has some experts.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    size: tuple[int | str, ...]
    engine: str = ""
    gguf: tuple[str, ...] = ()
    is_copy: bool = False
    is_expert: bool = False

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        return tuple(each if isinstance(each, int) else getattr(model, each) for each in self.size)

    def hf_shapes(self, model: ModelShape) -> list[tuple[int, ...]]:
        """Shape of each tensor in a Hugging Face folder."""
        return self.layout.hf_shapes(self.shape(model), 1, model)

    def count(self, model: ModelShape) -> int:
        """Numbers of the whole parameter."""
        return math.prod(self.shape(model))

    def of_layer(self, index: int, layer: int, prefix: str) -> WeightRule:
        """With full names: layer number `layer` of the model, and `index` of its pipeline stage."""
        hf = prefix.format(layer)
        return replace(
            self,
            megatron=f"decoder.layers.{index}.{self.megatron}",
            hf=tuple(hf + name for name in self.hf),
            engine=self.engine and hf + self.engine,
            gguf=tuple(f"blk.{layer}.{name}" for name in self.gguf),
        )

    def of_expert(self, expert: int, index: int, grouped: bool) -> WeightRule:
        """Of one expert: number `expert` of a layer, and `index` on its rank.

        Transformer Engine's `grouped` experts are parts of one module, others are modules of their own.
        """
        module, _, linear = self.megatron.partition(".linear")
        name = f"{self.megatron}{index}" if grouped else f"{module}.local_experts.{index}.linear{linear}"
        return replace(self, megatron=name, hf=tuple(name.format(expert) for name in self.hf))


VALUE_HEAD = (
    WeightRule("value_head.weight", ("score.weight",), Replicated(), (1, "hidden")),
    WeightRule("value_head.bias", ("score.bias",), Replicated(), (1,)),
)
"""The output of a critic, under the names of HF's `...ForTokenClassification`; a reward model has no bias."""


def stage_rules(
    model: ModelShape,
    first_layer: int,
    layers: int,
    first: bool,
    last: bool,
    experts: range | None = None,
    grouped: bool = False,
) -> list[WeightRule]:
    """Rules of one pipeline stage in the order of a weight update, with full names.

    HF names contain the layer's index in the model, Megatron names its index in the pipeline stage.

    Args:
        model: the model.
        first_layer: global index of the stage's first layer.
        layers: layers of the stage.
        first: the stage holds the embedding.
        last: the stage holds the final norm and the head, or the value head.
        experts: numbers of the experts of each layer that the rank holds; None: all.
        grouped: see `WeightRule.of_expert`.
    """
    family = model.family
    rules = [family.embedding] if first else []
    for index in range(layers):
        layer = first_layer + index
        templates = _layer_rules(model, layer, experts, grouped)
        rules += [rule.of_layer(index, layer, family.layer_prefix) for rule in templates]
    if last:
        rules.append(family.final_norm)
        if model.value_head:
            rules += VALUE_HEAD if model.value_bias else VALUE_HEAD[:1]
        elif not model.tied:
            rules.append(family.head)
        elif not first:
            rules.append(replace(family.embedding, megatron=family.head.megatron, is_copy=True))
    return rules


def _layer_rules(model: ModelShape, layer: int, experts: range | None, grouped: bool) -> Iterator[WeightRule]:
    rules = model.layer_rules(layer)
    yield from (rule for rule in rules if not rule.is_expert)
    of_experts = [rule for rule in rules if rule.is_expert]
    if of_experts:
        for index, expert in enumerate(range(model.experts) if experts is None else experts):
            yield from (rule.of_expert(expert, index, grouped) for rule in of_experts)


def model_rules(model: ModelShape) -> list[WeightRule]:
    """Rules of the whole model as one stage."""
    return stage_rules(model, 0, model.layers, first=True, last=True)


class GgufTensor(NamedTuple):
    """A tensor's name in a Hugging Face folder, and whether its rows are rotated in pairs of neighbours."""

    hf: str
    rotary_pairs: bool


def gguf_tensors(model: ModelShape) -> dict[str, GgufTensor]:
    """The tensors of a model by their names in a GGUF file; empty where the family has none."""
    return dict(_gguf_tensors(model))


def _gguf_tensors(model: ModelShape) -> Iterator[tuple[str, GgufTensor]]:
    pairs = model.family.gguf is not None and model.family.gguf.rotary_pairs
    for rule in model_rules(model):
        for part, (name, hf) in enumerate(zip(rule.gguf, rule.hf, strict=False)):
            rotated = isinstance(rule.layout, GroupedQKV) and part < 2
            yield name, GgufTensor(hf, pairs and rotated)


ALL_LINEAR = "all-linear"
"""Names every linear layer that can have an adapter."""


def target_name(hf: str) -> str:
    """The name of a linear layer in `lora_target`, from the name of its weight."""
    return hf.removesuffix(".weight").rpartition(".")[2]


def is_linear(rule: WeightRule) -> bool:
    """Whether a weight of a layer can get an adapter."""
    plain = rule.layout.is_split and len(rule.size) == 2 and not any("experts." in name for name in rule.hf)
    return plain and all(name.endswith("_proj.weight") for name in rule.hf)


def target_rules(rules: Sequence[WeightRule], targets: Sequence[str]) -> Iterator[tuple[WeightRule, list[int]]]:
    """The rules of weights with adapters, and which of the tensors of each have one."""
    for rule in filter(is_linear, rules):
        parts = [part for part, name in enumerate(rule.hf) if targets == [ALL_LINEAR] or target_name(name) in targets]
        if parts:
            yield rule, parts
