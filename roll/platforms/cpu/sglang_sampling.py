"""Seeded sampling for SGLang's CPU engine.

SGLang uses a request's `sampling_seed` only in its deterministic mode, whose kernels need a GPU. `use_sampling_seeds`
replaces two functions so that it is used on CPU: the one that collects the seeds of a batch, and the one that samples
with them. A sampled token depends only on the probabilities, the seed and its position, not on other requests of the
batch.
Without the kernel of `use_kernel` there is one exception: where a request of the batch is greedy or truncated, SGLang
sorts the tokens of all by probability first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from roll.platforms.cpu.kernels import CpuKernels

ALL_TOKENS = 1 << 30
"""SGLang's `top_k` of a request that samples from all tokens."""

UNSEEDED = 0
"""Seed of a request without one; requests of this project always carry one."""


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in (0, 1), [B] float64, as a function of integer seeds [B] and positions [B].

    The mixer is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), applied to
    the seed and then to its sum with the position; the upper 53 bits become the number.
    """
    mixed = _mix(_mix(seeds.to(torch.int64)) + positions.to(torch.int64))
    bits = torch.bitwise_right_shift(mixed, 11) & ((1 << 53) - 1)
    return (bits.to(torch.float64) + 0.5) * 2.0**-53


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function; int64 arithmetic wraps like the unsigned arithmetic of its definition."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift_right(value, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.bitwise_right_shift(value, bits) & ((1 << (64 - bits)) - 1)


def sample_with_seeds(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Samples one index per row by inverting the cumulative distribution.

    Args:
        log_probs: [B, V], not necessarily normalized; -inf is never sampled.
        seeds: [B] integers.
        positions: [B] position of the token to sample.

    Returns:
        [B, 1] int64.
    """
    cumulative = log_probs.to(torch.float64).exp_().cumsum_(-1)
    target = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=log_probs.shape[-1] - 1)


def use_sampling_seeds() -> None:
    """Makes SGLang in this process use `sampling_seed`; called once by `SglangCpuPlatform.init_backend`."""
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


def use_kernel(kernels: CpuKernels) -> None:
    """Samples requests that ask for no more than a temperature in one call, with their log-probs.

    So their tokens do not depend on greedy or truncated requests of the batch, which SGLang samples.
    """
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB, Sampler

    original = Sampler.forward

    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        logits = logits_output.next_token_logits
        takes = logits.dtype == torch.float32 and not sampling_info.has_custom_logit_processor
        takes = takes and self.rl_on_policy_target is None and not SGLANG_RETURN_ORIGINAL_LOGPROB
        rows = plain_rows(sampling_info, len(logits)) if takes else []
        if not rows:
            result: torch.Tensor = original(
                self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            return result
        more = return_logprob and (any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs))
        everything = len(rows) == len(logits) and not more
        if everything:
            logits = self._preprocess_logits(logits, sampling_info)
        chosen = slice(None) if everything else torch.tensor(rows)
        inputs = (logits, sampling_info.temperatures, sampling_info.sampling_seed, positions)
        drawn, log_probs = kernels.sample(*(each[chosen] for each in inputs))
        if everything:
            tokens = drawn
            if return_logprob:
                logits_output.next_token_logprobs = log_probs
        else:
            tokens = original(
                self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            tokens[chosen] = drawn.to(tokens.dtype)
            if return_logprob:
                logits_output.next_token_logprobs[chosen] = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    Sampler.forward = forward


def plain_rows(info: Any, count: int) -> list[int]:
    """Rows of a batch that ask for no more than a temperature, and not for the tokens that they were sampled from.

    Args:
        info: SGLang's SamplingBatchInfo. It has a greedy request as one of the best token alone.
        count: rows of the batch.
    """
    if info.sampling_seed is None or info.is_all_greedy:
        return []
    filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    if not filtered and info.sampling_mask_batch_indices is None:
        return list(range(count))
    plain = (info.top_ks >= ALL_TOKENS) & (info.top_ps >= 1.0) & (info.min_ps <= 0.0)
    if info.sampling_mask_batch_indices is not None:
        plain[info.sampling_mask_batch_indices] = False
    rows: list[int] = plain.nonzero().view(-1).tolist()
    return rows
