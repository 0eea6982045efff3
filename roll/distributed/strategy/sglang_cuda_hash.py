"""The hash SGLang takes of a tensor on a GPU, in torch operators that run on any device.

Words of 32 bits are mixed with their position (MurmurHash3's finalizer), summed over tiles, and the tiles summed and
mixed once more (SplitMix64's output function). The sums make it independent of the order of evaluation.
"""

from __future__ import annotations

import torch

SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION_FACTORS = (0x27D4EB2D, 0x165667B1)
POSITION_ROTATIONS = (15, 13)
TILE_WORDS = 8192
WORDS_AT_ONCE = 1 << 24
"""Words mixed in one go, a multiple of a tile: each takes a few int64 temporaries."""

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
    """The tensor's bytes as int32, zeros behind the last."""
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
    """The lower 32 bits; int64 wraps, and its lower half is right whatever the upper one lost."""
    return (value * factor) & _WORD


def _splitmix(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _LONG
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)
