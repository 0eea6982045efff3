"""Checksums of an engine's parameters, computed from tensors under HF names before they are sent.

SGLang can report a checksum of every parameter it computes with. It stores other tensors than a HF folder does: query,
key and value are one parameter, gate and up are one, and each rank holds its slice. This module lays the published
tensors out in the same way and takes the same checksum, so that comparing the two proves, for every parameter on every
rank, that the bytes the engine computes with are those the trainer sent: nothing missing, nothing left over, nothing
altered on the way or by the engine's loader. It covers the families in which linear layers are named as in llama.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from roll.distributed.strategy.sglang_cuda_hash import cuda_checksum

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

SGLANG_VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary with rows of zeros to a multiple of this."""


def engine_parameter(name: str) -> str:
    """The engine's parameter that the tensor of HF name `name` is, or is a part of."""
    match = re.fullmatch(r"(.*\.)(\w+)(\.weight|\.bias)", name)
    return f"{match[1]}{FUSED[match[2]][0]}{match[3]}" if match is not None and match[2] in FUSED else name


@dataclass(frozen=True)
class ModelShape:
    """The two sizes of a model that decide how its tensors are split: key heads, and whether embeddings are tied."""

    key_heads: int
    tied: bool

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Reads `config.json` of a HF folder."""
        config = json.loads((folder / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return cls(key_heads=heads, tied=bool(config.get("tie_word_embeddings", False)))


class EngineChecksums:
    """Takes tensors one by one, in any order, and yields the checksums that the engine will report."""

    def __init__(self, model: Path | ModelShape, tensor_parallel: int) -> None:
        """Starts empty.

        Args:
            model: HF folder, of which `config.json` is read, or its shape.
            tensor_parallel: ranks of the engine.
        """
        self._shape = model if isinstance(model, ModelShape) else ModelShape.from_folder(Path(model))
        self._ranks = tensor_parallel
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self._result: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one whole tensor under its HF name, in the dtype the engine computes in.

        Parts of a fused parameter are kept until the last of them has come.
        """
        parameter, layer = engine_parameter(name), name.split(".")[-2]
        if parameter == name:
            if not (self._shape.tied and name == "lm_head.weight"):
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
            ValueError: a part of a fused parameter never came.
        """
        for parameter, parts in self._parts.items():
            order = next(names for fused, names in FUSED.values() if f".{fused}." in parameter)
            missing = ", ".join(name for name in order if name not in parts)
            raise ValueError(f"{parameter}: {missing} was not published, only {', '.join(parts)}")
        return dict(self._result)

    def _finish(self, parameter: str, parts: list[tuple[str, torch.Tensor]]) -> None:
        for rank in range(self._ranks):
            slices = [self._slice(name, tensor.detach(), rank) for name, tensor in parts]
            self._result[f"{parameter}@{rank}"] = checksum(slices)

    def _slice(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What rank `rank` of the engine holds of the tensor."""
        if name.endswith(SPLIT_BY_VOCABULARY):
            return _vocabulary_slice(tensor, rank, self._ranks)
        if self._ranks == 1:
            return tensor
        if name in SPLIT_BY_ROWS:
            return tensor.chunk(self._ranks, 0)[rank]
        if name in SPLIT_BY_HEADS:
            copies = max(1, self._ranks // self._shape.key_heads)
            return tensor.chunk(self._ranks // copies, 0)[rank // copies]
        if name.endswith(SPLIT_BY_COLUMNS):
            return tensor.chunk(self._ranks, 1)[rank]
        return tensor


def _vocabulary_slice(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Rows of rank `rank`, with zeros where the padded vocabulary has no token."""
    rows = -(-tensor.shape[0] // SGLANG_VOCABULARY_MULTIPLE) * SGLANG_VOCABULARY_MULTIPLE // ranks
    held = tensor[rank * rows : (rank + 1) * rows]
    if held.shape[0] == rows:
        return held
    return torch.cat([held, held.new_zeros(rows - held.shape[0], *tensor.shape[1:])])


def checksum(slices: list[torch.Tensor]) -> str:
    """SGLang's checksum of the tensor that `slices` make when stacked along the first dimension.

    On a CPU it is the head of a SHA-256 over the bytes; on a GPU, where the bytes do not leave it, a hash of its own.
    """
    if slices[0].is_cuda:
        return cuda_checksum(torch.cat([part.contiguous().reshape(-1) for part in slices]))
    digest = hashlib.sha256()
    for part in slices:
        digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:8].hex()
