"""Random batches, functions that split and pad them, and batches for formulas written as loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
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


SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[0, 2, 4, 6], [1, 3, 5, 7]],
    [[i] for i in range(8)],
    [[5], [1, 0, 7], [2, 3, 4, 6]],
]
"""Divisions of eight samples over ranks and micro-batches."""

PAIR_SPLITS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 7], [0, 1], [4, 5, 2, 3]]]
"""The same of four pairs."""


def check_split(
    evaluate: Callable[[Batch], Any], batch: Batch, split: list[list[int]], padding: int, wider: Any = pad
) -> None:
    """The parts of a batch, padded, have its gradients; their losses and metrics add up to its own.

    `evaluate` gives a loss, its gradients [b, T, ...], and metrics.
    """
    loss, *gradients, metrics = evaluate(batch)
    total, sums = 0.0, dict.fromkeys(metrics, 0.0)
    for indices in split:
        part, *of_part, reported = evaluate(wider(rows(batch, indices), padding))
        for whole, own in zip(gradients, of_part, strict=True):
            width = whole.shape[1]
            torch.testing.assert_close(own[:, :width], whole[indices])
            assert own[:, width:].abs().sum() == 0
        total += part
        for name, value in reported.items():
            sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value
    assert total == pytest.approx(loss) and sums == pytest.approx(metrics)


DRAWS = range(12)
"""Seeds of `draw`."""

DRAW_TOKENS = 7

CLOSE = {"rel": 1e-6, "abs": 1e-6}


@dataclass(frozen=True)
class Draw:
    """A random batch; tables are [B, DRAW_TOKENS] float64 with NaN outside the mask."""

    mask: Tensor
    groups: list[int]
    scores: list[float]
    tables: dict[str, Tensor]

    def response(self, sample: int, name: str) -> list[float]:
        """The values of a response's tokens."""
        return [float(x) for x in self.tables[name][sample][self.mask[sample]]]

    @property
    def samples(self) -> range:
        return range(len(self.scores))

    def tokens(self, per_response: Callable[[int], Sequence[float]]) -> list[float]:
        """What a function of a sample gives for its tokens, of all samples."""
        return [value for sample in self.samples for value in per_response(sample)]

    def group(self, sample: int) -> list[int]:
        """The samples of a sample's group."""
        return [other for other in self.samples if self.groups[other] == self.groups[sample]]

    def length(self, sample: int) -> int:
        return int(self.mask[sample].sum())


def draw(seed: int) -> Draw:
    """Groups of 1 to 4 samples; the first has equal scores, the last is alone."""
    random = torch.Generator().manual_seed(seed)
    sizes = [3, *torch.randint(2, 5, (2,), generator=random).tolist(), 1]
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    count, spread = len(groups), (0.02, 1.0, 30.0)[seed % 3]
    lengths = torch.randint(0, DRAW_TOKENS, (count,), generator=random)
    lengths[torch.randperm(count, generator=random)[:2]] = torch.tensor([0, 1])
    starts = torch.randint(0, 2, (count,), generator=random)
    position = torch.arange(DRAW_TOKENS)
    mask = (position >= starts[:, None]) & (position < (starts + lengths)[:, None])
    scores = torch.randn(count, generator=random).float()
    scores[:3] = 0.3

    def table(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.nan)

    def normal() -> Tensor:
        return torch.randn(count, DRAW_TOKENS, generator=random, dtype=torch.float64)

    log_probs = {name: table(-spread * normal().abs()) for name in ("log_probs", "base", "ref_log_probs")}
    others = {"advantages": normal(), "values": normal().float(), "entropy": normal().abs()}
    others |= {"sum_pi_squared": torch.rand(count, DRAW_TOKENS, generator=random, dtype=torch.float64)}
    others |= {"high_covariance": (normal() > 0.5).double()}
    return Draw(mask, groups, scores.tolist(), log_probs | {name: table(each) for name, each in others.items()})
