"""Loads HF safetensors into a Megatron pipeline stage; each rank reads only the slices it owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from roll.models.families.hf_config import UnsupportedModel
from roll.models.families.mixture import ExpertPlace
from roll.models.families.shape import ModelShape
from roll.models.families.weights import VALUE_HEAD, WeightRule, stage_rules
from roll.models.weight_files import open_weights, tensor_files

ALL = ExpertPlace()


class HFTensors:
    """The tensors of a HF folder by name; files are opened on demand.

    Raises:
        UnsupportedModel: as `tensor_files`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of = tensor_files(self.folder)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def slice_of(self, name: str) -> Any:
        """The tensor `name` as an object that reads the row and column slices it is indexed with.

        Raises:
            UnsupportedModel: there is no such tensor.
        """
        if name not in self._file_of:
            raise UnsupportedModel(f"{self.folder}: tensor {name} is missing")
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_weights(self.folder / file, "pt")
        return self._files[file]


@torch.no_grad()
def import_hf(
    model: torch.nn.Module, folder: str | Path, config: ModelShape, rank: int, ranks: int, experts: ExpertPlace = ALL
) -> None:
    """Sets every parameter of this stage from `folder`, cast to the parameter's dtype, with zeros in padding rows.

    A value head is 0 where the folder is that of a language model; its bias also where it has none. A folder's bias
    is left out if the model has none, which moves all values by the same number.

    Args:
        model: a stage built by `build_gpt_model`.
        folder: HF folder of a model with the shape `config`.
        config: shape of the model.
        rank: this rank's index among the tensor-parallel ranks.
        ranks: number of tensor-parallel ranks.
        experts: those of this rank.

    Raises:
        UnsupportedModel: a tensor is missing, has another shape or a value that is not finite.
    """
    tensors = HFTensors(folder)
    parameters = dict(model.named_parameters())
    for rule in rules_of(model, config, experts):
        parameter = parameters.pop(rule.megatron)
        if rule in VALUE_HEAD and rule.hf[0] not in tensors and _starts_at_zero(rule, config):
            parameter.zero_()
            continue
        place = (experts.tensor_rank, experts.tensor_ranks) if rule.is_expert else (rank, ranks)
        shard = rule.layout.shard([tensors.slice_of(name) for name in rule.hf], config, *place)
        _fill(parameter, shard, rule, tensors.folder)
    if parameters:
        name = config.family.name
        raise UnsupportedModel(f"{folder}: no HF tensor is mapped to {sorted(parameters)} for family {name}")


def _starts_at_zero(rule: WeightRule, config: ModelShape) -> bool:
    """Whether this part of a value head need not be in the folder."""
    return config.architecture not in config.family.value_architectures or rule.megatron.endswith("bias")


def rules_of(model: Any, config: ModelShape, experts: ExpertPlace) -> list[WeightRule]:
    """The rules of a stage's parameters on a rank that has these experts."""
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1
    held, grouped = experts.numbers(config.experts), model.config.moe_grouped_gemm
    return stage_rules(config, first_layer, len(layers), model.pre_process, model.post_process, held, grouped)


def _fill(parameter: torch.Tensor, shard: torch.Tensor, rule: WeightRule, folder: Path) -> None:
    rows = shard.shape[0]
    fits = shard.shape[1:] == parameter.shape[1:] and rows <= parameter.shape[0]
    padded = fits and rows < parameter.shape[0]
    if not fits or (padded and "word_embeddings" not in rule.megatron and "output_layer" not in rule.megatron):
        raise UnsupportedModel(
            f"{folder}: {', '.join(rule.hf)} gives {tuple(shard.shape)}, config.json asks for {tuple(parameter.shape)}"
        )
    broken = shard.numel() - int(torch.isfinite(shard).sum())
    if broken:
        raise UnsupportedModel(
            f"{folder}: {', '.join(rule.hf)} has {broken} of {shard.numel()} values that are NaN or infinite"
        )
    parameter[:rows].copy_(shard)
    parameter[rows:].zero_()
