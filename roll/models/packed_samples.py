"""Megatron's description of samples that follow each other in one sequence, with what torch's attention needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class PackedSamples(PackedSeqParams):  # type: ignore[misc]  # Megatron is not typed
    """A packed micro-batch: tokens of each sample on the host, and the position [S] of each token in its sample."""

    lengths: Sequence[int] = ()
    positions: torch.Tensor | None = None
