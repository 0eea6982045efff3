"""Checksums of an engine's parameters, computed from tensors under HF names before they are sent.

SGLang can report a checksum of every parameter it computes with. It stores other tensors than a HF folder does: query,
key and value are one parameter, gate and up are one, and each rank holds its slice. This module arranges the sent
tensors in the same way and computes the same checksum. Equal checksums prove, for every parameter on every rank, that
the engine computes with exactly the bytes the trainer sent: none is missing, additional, or altered by the transport or
the engine's loader. It covers the model families whose linear layers are named as in llama.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from roll.configs.model_config import read_model_config
from roll.hub.names import CONFIG_NAME

FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
"""Layer by its HF name: the parameter it is part of, and the parts of that parameter in order."""

SPLIT_BY_ROWS = ("q_proj", "gate_proj", "up_proj")
SPLIT_BY_HEADS = ("k_proj", "v_proj")
SPLIT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
SPLIT_BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
WHOLE = ("norm.weight",)
"""Ends of the names of tensors that every rank has whole: norms of layers, of heads, and the last one."""

ENGINE_VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary with rows of zeros to a multiple of this (the training side has its own multiple)."""


def engine_parameter(name: str) -> str:
    """The engine's parameter that contains the tensor of HF name `name`."""
    match = re.fullmatch(r"(.*\.)(\w+)(\.weight|\.bias)", name)
    return f"{match[1]}{FUSED[match[2]][0]}{match[3]}" if match is not None and match[2] in FUSED else name


class EngineChecksums:
    """Computes the checksums that the engine will report, from tensors added one by one in any order."""

    def __init__(self, kv_heads: int, tied: bool, tensor_parallel: int) -> None:
        """Args are key-value heads and tied embeddings of the model, and the number of ranks of the engine."""
        self._kv_heads, self._tied, self._ranks = kv_heads, tied, tensor_parallel
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._result: dict[str, str] = {}

    @classmethod
    def of_model(cls, folder: Path, tensor_parallel: int) -> EngineChecksums:
        """For the model in a HF folder.

        Raises:
            UnsupportedModel: as `read_model_config`.
        """
        config = read_model_config(folder / CONFIG_NAME)
        kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return cls(kv_heads, config.get("tie_word_embeddings", False), tensor_parallel)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds one whole tensor under its HF name, in the dtype the engine computes in.

        Parts of a fused parameter are kept until the last of them was added.

        Raises:
            ValueError: as `_slice`.
        """
        parameter, layer = engine_parameter(name), name.split(".")[-2]
        if parameter == name:
            if not (self._tied and name == "lm_head.weight"):
                self._finish(name, [(name, tensor)])
            return
        order = FUSED[layer][1]
        parts = self._parts.setdefault(parameter, {})
        parts[layer] = tensor.detach().clone()
        if len(parts) == len(order):
            self._finish(parameter, [(part, parts[part]) for part in order])
            del self._parts[parameter]

    def result(self) -> dict[str, str]:
        """Checksum by `parameter@rank`.

        Raises:
            ValueError: a part of a fused parameter was not added.
        """
        for parameter, parts in self._parts.items():
            order = next(names for fused, names in FUSED.values() if f".{fused}." in parameter)
            missing = ", ".join(name for name in order if name not in parts)
            raise ValueError(f"{parameter}: {missing} was not sent, only {', '.join(parts)}")
        return dict(self._result)

    def _finish(self, parameter: str, parts: list[tuple[str, torch.Tensor]]) -> None:
        for rank in range(self._ranks):
            slices = [self._slice(name, tensor.detach(), rank) for name, tensor in parts]
            self._result[f"{parameter}@{rank}"] = checksum(slices)

    def _slice(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of the tensor on rank `rank` of the engine.

        Raises:
            ValueError: there are several ranks, and it is not known how SGLang splits the tensor.
        """
        if name.endswith(SPLIT_BY_VOCABULARY):
            return _vocabulary_slice(tensor, rank, self._ranks)
        if self._ranks == 1:
            return tensor
        if name in SPLIT_BY_ROWS:
            return tensor.chunk(self._ranks, 0)[rank]
        if name in SPLIT_BY_HEADS:
            copies = max(1, self._ranks // self._kv_heads)
            return tensor.chunk(self._ranks // copies, 0)[rank // copies]
        if name.endswith(SPLIT_BY_COLUMNS):
            return tensor.chunk(self._ranks, 1)[rank]
        if name.endswith(WHOLE):
            return tensor
        raise ValueError(
            f"{name}: it is not known how SGLang splits this tensor over {self._ranks} ranks; add it to one of "
            "SPLIT_BY_... or to WHOLE in roll/distributed/infer/sglang_checksums.py"
        )


def _vocabulary_slice(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Rows of rank `rank`, with zeros where the padded vocabulary has no token."""
    rows = -(-tensor.shape[0] // ENGINE_VOCABULARY_MULTIPLE) * ENGINE_VOCABULARY_MULTIPLE // ranks
    held = tensor[rank * rows : (rank + 1) * rows]
    if held.shape[0] == rows:
        return held
    return torch.cat([held, held.new_zeros(rows - held.shape[0], *tensor.shape[1:])])


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
