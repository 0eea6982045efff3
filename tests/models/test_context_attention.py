"""Attention of samples that are split over context ranks equals attention over whole samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from roll.models import context_attention
from roll.models.context_attention import ContextSplit

LENGTHS = [12, 12, 24, 12]
HEADS, GROUPS, SIZE, SCALE = 4, 2, 8, 0.3


def whole_attention(query: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """[heads, T, D] of queries [heads, T, D], and keys and values [T, groups, 2 D] side by side."""
    key, value = both.transpose(0, 1).chunk(2, dim=-1)
    samples = zip(*(each.split(LENGTHS, dim=1) for each in (query, key, value)), strict=True)
    options = {"is_causal": True, "scale": SCALE, "enable_gqa": True}
    return torch.cat([F.scaled_dot_product_attention(*sample, **options) for sample in samples], dim=1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["cpu", "kernels of GPUs"])
def test_each_rank_attends_as_in_whole_samples(monkeypatch, ranks, kind):
    """Gradients too; this process plays the ranks one by one and sums what they give for keys and values."""
    torch.manual_seed(0)
    query, both = torch.randn(HEADS, sum(LENGTHS), SIZE), torch.randn(sum(LENGTHS), GROUPS, 2 * SIZE)
    upstream = torch.randn(HEADS, sum(LENGTHS), SIZE)
    inputs = query.requires_grad_(), both.requires_grad_()
    expected = whole_attention(*inputs)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    for name in ("gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        monkeypatch.setattr(context_attention.tensor_parallel, name, lambda x, group: x)
    attend = context_attention._OnCPU.apply if kind == "cpu" else context_attention._by_kernel
    chunks = torch.cat([torch.arange(length) // (length // (2 * ranks)) for length in LENGTHS])
    split = torch.minimum(chunks, 2 * ranks - 1 - chunks).argsort(stable=True)
    of_both = torch.zeros_like(both)
    for rank, rows in enumerate(split.chunk(ranks)):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks)
        own = query[:, rows].detach().requires_grad_(), both[split].detach().requires_grad_()
        context = attend(*own, ContextSplit(group, LENGTHS, split.argsort(), split), SCALE)
        torch.testing.assert_close(context, expected[:, rows])
        of_queries, of_keys = torch.autograd.grad(context, own, upstream[:, rows])
        torch.testing.assert_close(of_queries, gradients[0][:, rows])
        of_both[split] += of_keys
    torch.testing.assert_close(of_both, gradients[1], atol=1e-5, rtol=1e-5)
