"""Checksums of an engine's parameters, computed from tensors under HF names before they are sent.

SGLang can report a checksum of every parameter it computes with. It stores other tensors than a HF folder does: query,
key and value are one parameter, gate and up are one, so are those of all experts of a layer, and each rank holds its
slice. This module arranges the sent
tensors in the same way and computes the same checksum. Equal checksums prove, for every parameter on every rank, that
the engine computes with exactly the bytes the trainer sent: none is missing, additional, or altered by the transport or
the engine's loader. How a family's tensors are fused and split is in its weight rules.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from roll.models.families.shape import ModelShape, known_model_shape
from roll.models.families.weights import WeightRule, model_rules


class Place(NamedTuple):
    """Where an engine has a tensor: part number `part` of the parameter that `rule` makes."""

    parameter: str
    part: int
    rule: WeightRule


def engine_places(model: ModelShape) -> dict[str, Place]:
    """The place of every tensor of a model by its HF name."""
    return {
        name: Place(rule.engine or name, part, rule) for rule in model_rules(model) for part, name in enumerate(rule.hf)
    }


class EngineChecksums:
    """Computes the checksums that the engine will report, from tensors added one by one in any order."""

    def __init__(self, model: ModelShape, tensor_parallel: int) -> None:
        """For `model` on an engine of `tensor_parallel` ranks."""
        self._model, self._ranks = model, tensor_parallel
        self._places = engine_places(model)
        self._names: dict[str, list[str]] = {}
        """Tensors of each parameter, in the order in which it has them."""
        for name, place in self._places.items():
            self._names.setdefault(place.parameter, []).append(name)
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._result: dict[str, str] = {}

    @classmethod
    def of_model(cls, folder: Path, tensor_parallel: int) -> EngineChecksums:
        """For the model in a HF folder.

        Raises:
            UnsupportedModel: as `known_model_shape`.
        """
        return cls(known_model_shape(folder), tensor_parallel)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one whole tensor under its HF name, in the dtype the engine computes in.

        Parts of a fused parameter are kept until the last of them was added. The head of a model with tied embeddings
        is left out.

        Raises:
            ValueError: the model has no such tensor.
        """
        if self._model.tied and name in self._model.family.head.hf:
            return
        if name not in self._places:
            raise ValueError(f"{name}: is not a tensor of a {self._model.architecture}; add its rule to the family")
        parameter = self._places[name].parameter
        if parameter == name:
            self._finish(parameter, [(name, tensor)])
            return
        parts = self._parts.setdefault(parameter, {})
        parts[name] = tensor.detach().clone()
        if len(parts) == len(self._names[parameter]):
            self._finish(parameter, [(part, parts[part]) for part in self._names[parameter]])
            del self._parts[parameter]

    def result(self) -> dict[str, str]:
        """Checksum by `parameter@rank`.

        Raises:
            ValueError: a part of a fused parameter was not added.
        """
        for parameter, parts in self._parts.items():
            missing = ", ".join(name for name in self._names[parameter] if name not in parts)
            raise ValueError(f"{parameter}: {missing} was not sent, only {', '.join(parts)}")
        return dict(self._result)

    def _finish(self, parameter: str, parts: list[tuple[str, torch.Tensor]]) -> None:
        for rank in range(self._ranks):
            slices = [self._slice(name, tensor.detach(), rank) for name, tensor in parts]
            self._result[f"{parameter}@{rank}"] = checksum(slices)

    def _slice(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        _, part, rule = self._places[name]
        return rule.layout.engine_slice(tensor, part, self._model, rank, self._ranks)


def checksum(slices: list[torch.Tensor]) -> str:
    """SGLang's checksum of the tensor that `slices` make when stacked along the first dimension.

    On a CPU it is the head of a SHA-256 over the bytes; on a GPU `cuda_checksum`.
    """
    if slices[0].is_cuda:
        return cuda_checksum(torch.cat([part.contiguous().reshape(-1) for part in slices]))
    digest = hashlib.sha256()
    for part in slices:
        digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()


# SGLang's checksum of a tensor on a GPU, in torch operators that run on any device. Words of 32 bits are mixed with
# their position (MurmurHash3's finalizer), summed over tiles, and the tiles summed and mixed once more (SplitMix64's
# output function). The sums make it independent of the order of evaluation.

SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_ROTATIONS = (15, 13)
TILE_WORDS = 8192
WORDS_AT_ONCE = 1 << 24
"""Words mixed at a time, a multiple of a tile: each needs a few int64 temporaries."""

_WORD = 0xFFFFFFFF
_LONG = (1 << 64) - 1


def cuda_checksum(tensor: torch.Tensor) -> str:
    """SGLang's checksum of `tensor` as it would report it from a GPU: sixteen hexadecimal digits."""
    words = _words(tensor)
    count = words.numel()
    if count == 0:
        return f"{0:016x}"
    total = 0
    for first in range(0, count, WORDS_AT_ONCE):
        part = words[first : first + WORDS_AT_ONCE].to(torch.int64) & _WORD
        position = torch.arange(first, first + part.numel(), device=part.device)
        tiles = [_tiles(part, position, lane, count).tolist() for lane in (0, 1)]
        total += sum((high << 32) | low for high, low in zip(*tiles, strict=True))
    return f"{_splitmix(total & _LONG):016x}"


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int32, padded with zeros."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 4
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int32)


def _tiles(words: torch.Tensor, position: torch.Tensor, lane: int, count: int) -> torch.Tensor:
    """One 32-bit hash per tile, as int64."""
    rotation = POSITION_ROTATIONS[lane]
    rotated = ((position << rotation) | (position >> (32 - rotation))) & _WORD
    salt = ((_product(position, POSITION_FACTORS[lane]) + SEEDS[lane]) & _WORD) ^ rotated
    mixed = _mix(words ^ salt)
    mixed = torch.cat([mixed, mixed.new_zeros(-mixed.numel() % TILE_WORDS)])
    return _mix((mixed.view(-1, TILE_WORDS).sum(1) & _WORD) ^ ((count * 4) & _WORD))


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value ^ (value >> 16)
    value = _product(value, 0x85EBCA6B)
    value = value ^ (value >> 13)
    value = _product(value, 0xC2B2AE35)
    return value ^ (value >> 16)


def _product(value: torch.Tensor, factor: int) -> torch.Tensor:
    """The lower 32 bits; int64 wraps, and the lower half of a wrapped product is exact."""
    return (value * factor) & _WORD


def _splitmix(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _LONG
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)
