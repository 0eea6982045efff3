"""Seeded sampling for SGLang's CPU engine.

SGLang honours a request's `sampling_seed` only in its deterministic mode, whose kernels need a GPU. Two functions are
replaced here so that it is honoured on CPU: the one that collects the seeds of a batch, and the one that draws with
them. A draw depends on nothing but the probabilities, the seed and the position of the token, so a sample does not
depend on which other requests stand in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

UNSEEDED = 0
"""Seed of a request without one; requests of this project always carry one."""


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), one per row, from integers seeds [B] and positions [B] alone; [B] float64.

    The mixer is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), applied to
    the seed and then to its sum with the position; the upper 53 bits become the number.
    """
    mixed = _mix(_mix(seeds.to(torch.int64)) + positions.to(torch.int64))
    bits = torch.bitwise_right_shift(mixed, 11) & ((1 << 53) - 1)
    return (bits.to(torch.float64) + 0.5) * 2.0**-53


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function; int64 arithmetic wraps as the unsigned arithmetic of its definition does."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.bitwise_right_shift(value, bits) & ((1 << (64 - bits)) - 1)


def sample_with_seeds(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws one index per row by inverting the cumulative distribution.

    Args:
        log_probs: [B, V], not necessarily normalised; -inf is never drawn.
        seeds: [B] integers.
        positions: [B] position of the token to be drawn.

    Returns:
        [B, 1] int64.
    """
    cumulative = log_probs.to(torch.float64).exp_().cumsum_(-1)
    target = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=log_probs.shape[-1] - 1)


def install() -> None:
    """Makes this process's SGLang honour `sampling_seed`; called once when the platform comes up."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    collect = SamplingBatchInfo.from_schedule_batch

    def from_schedule_batch(batch: ScheduleBatch, vocab_size: int) -> Any:
        info = collect(batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(from_schedule_batch)
    sampler.multinomial_with_seed = sample_with_seeds
