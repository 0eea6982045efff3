"""Random batches, and functions that split and pad them."""

from __future__ import annotations

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def random_batch(samples: int = 8, tokens: int = 9, seed: int = 0) -> Batch:
    """Samples with prompts and responses of different lengths; float64, for strict comparisons."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens - 1, (samples,), generator=generator)
    starts = torch.randint(1, 3, (samples,), generator=generator)
    positions = torch.arange(tokens)
    mask = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(samples, tokens, generator=generator, dtype=torch.float64)

    old = -draw(1.0).abs()
    return {
        "response_mask": mask,
        "old_log_probs": old,
        "log_probs": old + draw(0.3),
        "behavior_log_probs": old + draw(0.3),
        "ref_log_probs": old + draw(0.3),
        "advantages": draw(1.0) * mask,
        "entropy": draw(1.0).abs(),
        "scores": torch.randn(samples, generator=generator, dtype=torch.float64),
    }


def rows(batch: Batch, indices: list[int]) -> Batch:
    return {name: tensor[indices] for name, tensor in batch.items()}


def pad(batch: Batch, columns: int, fill: float = 123.0) -> Batch:
    """The batch with padding on the right; other values outside the mask."""

    def wider(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        value = False if name == "response_mask" else fill
        return torch.cat([tensor, tensor.new_full((tensor.shape[0], columns), value)], dim=1)

    return {name: wider(name, tensor) for name, tensor in batch.items()}
