"""Frequencies of the rotary position embedding."""

from __future__ import annotations

import math

import torch

from roll.models.hf_config import RotaryConfig


def rotary_frequencies(rotary: RotaryConfig, head_size: int) -> torch.Tensor:
    """Angle per position of each pair of channels, [head_size / 2] float32.

    f_i = base^(-2i / head_size). Kind `linear` divides all by the factor; kind `llama3` divides those whose
    wavelength exceeds original_positions / low_frequency_factor, keeps those below original_positions /
    high_frequency_factor, and blends linearly (in turns over original_positions) between.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rotary.base**exponent)
    if rotary.kind == "default":
        return frequencies
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    turns = rotary.original_positions * frequencies / (2 * math.pi)
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rotary.factor
