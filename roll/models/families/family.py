"""What the project knows about one model family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.models.families.chat_template import ChatTemplate
from roll.models.families.decoder import EMBEDDING, FINAL_NORM, HEAD, ONLY
from roll.models.families.mixture import Mixture
from roll.models.families.weights import WeightRule

CHATML_END = "<|im_end|>"


@dataclass(frozen=True)
class RehearsalModel:
    """How `roll rehearse` recognises a model by its name, and what its random model speaks.

    Attributes:
        names: pattern in the name of a model.
        template: built-in chat template in place of the model's own.
        end_of_turn: token that ends a turn of the template.
        tokenizer: class of transformers that reads the folder; None reads any tokenizer.json.
        shape: keys of config.json of a small model, in addition to the keys of all families.
    """

    names: re.Pattern[str]
    template: str = "chatml"
    end_of_turn: str = CHATML_END
    tokenizer: str | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GgufNames:
    """How a GGUF file stores the family.

    Attributes:
        architecture: its `general.architecture`.
        rotary_pairs: the two channels of one rotation are neighbours in a head, and not half a head apart.
    """

    architecture: str
    rotary_pairs: bool = False


@dataclass(frozen=True)
class SGLangClasses:
    """Classes of SGLang, as `module:Class`; an engine finds that of the model by `architectures` in config.json.

    Attributes:
        decoder: layers that `roll/platforms/cpu/sglang_model.py` computes in one call on a CPU.
        scorer: a sequence classifier, whose head `sglang_models/value_models.py` replaces; None: no reward engines.
        reads_head_dim: on a CPU its layers take `head_dim` from config.json, else hidden size / heads.
    """

    decoder: str | None = None
    scorer: str | None = None
    reads_head_dim: bool = True


@dataclass(frozen=True)
class LayerTraits:
    """What a decoder layer computes in another way than that of llama; `roll/models/local_spec.py` has it all.

    Attributes:
        output_norms: attention and MLP end with a norm, before the residual is added.
        rotary_pairs: the two channels of one rotation are neighbours in a head, and not half of the rotated part apart.
        partial_rotary: `partial_rotary_factor` may be below 1: the last channels of a head are not rotated.
        local_layers: some layers, by `layer_types`, attend to the last `sliding_window` tokens alone, with a rotary
            embedding of base `local_rope_theta`.
        centred_norms: norms multiply by 1 + weight.
        scaled_embedding: embeddings are multiplied by the root of the hidden size.
        gelu: the MLP's activation is GELU in its tanh form, and not SiLU.
    """

    output_norms: bool = False
    rotary_pairs: bool = False
    partial_rotary: bool = False
    local_layers: bool = False
    centred_norms: bool = False
    scaled_embedding: bool = False
    gelu: bool = False


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """Models of one architecture.

    Attributes:
        name: as `model_type` in config.json.
        architecture: as in `architectures` of config.json.
        layer: weights of a layer, of a mixture those of a dense one; names without the prefix of the layer.
        sparse_layer: weights of a layer with experts.
        mixture: reads the numbers of the experts from settings with the keys of llama; None: a dense model.
        sizes: whole numbers above 0 that such settings have, beyond those of llama.
        embedding, final_norm, head: the other weights.
        layer_prefix: of the Hugging Face names of a layer, with its index.
        megatron: options of Megatron's `TransformerConfig` that other families do not have.
        traits: of its layers.
        settings: makes a config.json one with the keys of llama.
        templates: its chat templates by their names in `data_args.template`.
        only: options that change the computation, and the one supported value of each, which is also the default.
        transformers_class: `module:Class` of the model; empty: transformers has a class of the name `architecture`.
    """

    name: str
    architecture: str
    layer: tuple[WeightRule, ...]
    rehearsal: RehearsalModel
    sparse_layer: tuple[WeightRule, ...] = ()
    mixture: Callable[[Mapping[str, Any]], Mixture] | None = None
    sizes: tuple[str, ...] = ()
    embedding: WeightRule = EMBEDDING
    final_norm: WeightRule = FINAL_NORM
    head: WeightRule = HEAD
    layer_prefix: str = "model.layers.{}."
    megatron: Mapping[str, Any] = field(default_factory=dict)
    traits: LayerTraits = LayerTraits()
    settings: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    only: Mapping[str, Any] = field(default_factory=lambda: ONLY)
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict)
    gguf: GgufNames | None = None
    sglang: SGLangClasses = SGLangClasses()
    transformers_class: str = ""

    @property
    def stem(self) -> str:
        """The architecture without its head, such as Llama."""
        return self.architecture.partition("For")[0]

    @property
    def value_architectures(self) -> tuple[str, ...]:
        """Models of the family whose output is a value, such as reward models: a critic can start from one."""
        return tuple(self.stem + suffix for suffix in ("ForTokenClassification", "ForSequenceClassification"))

    @property
    def scorer_name(self) -> str:
        """The class by which an engine scores sequences."""
        return f"{self.stem}ValueModel"
