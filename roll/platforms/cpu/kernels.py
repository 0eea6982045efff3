"""Calls of the C++ kernels of a CPU engine with torch's tensors; needs torch and a C++ compiler, not SGLang."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from roll.platforms.cpu.library import load_library

CACHE_DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of the key-value cache; queries of another dtype are converted to float32 and back."""


@dataclass(frozen=True)
class Requests:
    """The requests of one forward pass, as all layers of it read them; made by `CpuKernels.requests`.

    The queries of a request are the last of its keys.
    """

    tensors: tuple[torch.Tensor, ...]
    """Slot table [rows, context] int32; row, keys, queries and first query [B] int64 of each request."""

    addresses: tuple[int, ...]


class CpuKernels:
    """The kernels for heads of one size; see the functions of cpp/kernels.cpp."""

    def __init__(self, head_dim: int) -> None:
        """Builds the library, or finds it built.

        Raises:
            BuildError: there is no compiler, or it failed.
        """
        self.head_dim = head_dim
        self.library = load_library(head_dim)

    @staticmethod
    def requests(
        slot_table: torch.Tensor, rows: torch.Tensor, key_lengths: torch.Tensor, query_lengths: torch.Tensor | None
    ) -> Requests:
        """What attention reads of the requests of a batch.

        Args:
            slot_table: [rows, context] int32, cache slot of each position.
            rows: [B] row of each request in `slot_table`.
            key_lengths: [B] keys of each request.
            query_lengths: [B] new queries of each request, at most its keys; None: one each.
        """
        queries = torch.ones_like(rows) if query_lengths is None else query_lengths
        integers = [x.to(torch.int64).contiguous() for x in (rows, key_lengths, queries)]
        starts = torch.cumsum(integers[2], 0) - integers[2]
        tensors = (slot_table.to(torch.int32), *integers, starts)
        return Requests(tensors, tuple(tensor.data_ptr() for tensor in tensors))

    def attends(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
        """Whether `attend` takes tensors of these shapes and types."""
        sizes = {query.shape[-1], k_cache.shape[-1], v_cache.shape[-1]}
        caches = k_cache.dtype == v_cache.dtype and k_cache.dtype in CACHE_DTYPES
        return sizes == {self.head_dim} and caches and k_cache.stride(-1) == v_cache.stride(-1) == 1

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        requests: Requests,
        scale: float,
    ) -> None:
        """Writes causal attention into `output`.

        Args:
            query: [tokens, heads, D] of all requests, one after the other.
            output: [tokens, heads, D], written.
            k_cache: [slots, key heads, D] float32 or bfloat16, with any strides of slots and heads.
            v_cache: the same of values.
            requests: of the batch.
            scale: of the scores.
        """
        queries = query.to(torch.float32).contiguous()
        result = output if output.dtype == torch.float32 and output.is_contiguous() else torch.empty_like(queries)
        table, rows = requests.tensors[:2]
        strides = (*k_cache.stride()[:2], *v_cache.stride()[:2])
        sizes = (ctypes.c_int64 * 8)(len(rows), query.shape[1], k_cache.shape[1], table.stride(0), *strides)
        addresses = (x.data_ptr() for x in (queries, result, k_cache, v_cache))
        self.library.paged_attention(*addresses, *requests.addresses, sizes, scale, k_cache.dtype == torch.bfloat16)
        if result is not output:
            output.copy_(result)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 x [..., K] times the transposed weight [N, K], plus a bias [N], into out [..., N] if there is one.

        A row's result has the same bits whatever the other rows are. Tensors may lie in memory in any way; it costs
        nothing if rows or columns of the weight are contiguous, as those of a transposed one.
        """
        rows, weight = x.reshape(-1, x.shape[-1]), weight if 1 in weight.stride() else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        result = x.new_empty(len(rows), len(weight)) if out is None or not _has_rows(out) else out
        addresses = (rows.data_ptr(), weight.data_ptr(), _address(bias), result.data_ptr())
        strides = (ctypes.c_int64 * 5)(*rows.stride(), *weight.stride(), result.stride(0))
        self.library.multiply_rows(*addresses, len(rows), *weight.shape, strides)
        if out is None:
            return result.view(*x.shape[:-1], len(weight))
        return out if out is result else out.copy_(result.view(out.shape))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The norm of float32 x [..., H], or of x + residual, and that sum."""
        x = x.contiguous()
        out, total = torch.empty_like(x), None
        if residual is not None:
            residual, total = residual.contiguous(), torch.empty_like(x)
        hidden = x.shape[-1]
        inputs = (x.data_ptr(), _address(residual), _address(total), weight.data_ptr(), out.data_ptr())
        self.library.rms_norm(*inputs, x.numel() // hidden, hidden, epsilon)
        return out, total

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Float32 x [tokens, heads * D] with the halves of each head rotated.

        Args:
            x: rows may lie apart, such as those of a part of the projections of queries, keys and values.
            positions: [tokens] int64.
            table: [positions, D] float32: cosines, then sines.

        Raises:
            IndexError: a position is not in the table.
        """
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = x.new_empty(x.shape)
        heads = x.shape[1] // self.head_dim
        addresses = (x.data_ptr(), out.data_ptr(), positions.data_ptr(), table.data_ptr())
        if self.library.rotate(*addresses, len(x), heads, x.stride(0), len(table)):
            raise IndexError(f"a position of {positions.tolist()} is not in a rotary table of {len(table)}")
        return out

    def silu_multiply(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half times the second half of float32 x [..., 2 F]."""
        x, size = x.contiguous(), x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        self.library.silu_multiply(x.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out

    def sample(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of softmax(logits / temperature) for each row, and its log-prob.

        Both depend on the row, its seed and its position alone. The distribution and the uniform number are those of
        `sglang_sampling`. A logit of -inf is not sampled.

        Args:
            logits: [B, V] float32.
            temperatures: [B] or [B, 1] float32, positive.
            seeds: [B] integers.
            positions: [B] position of the token to sample.

        Returns:
            [B] int32 and [B] float32.
        """
        logits, temperatures = logits.contiguous(), temperatures.contiguous()
        seeds, positions = seeds.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
        rows, vocabulary = logits.shape
        tokens, log_probs = logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows)
        inputs = (x.data_ptr() for x in (logits, temperatures, seeds, positions))
        self.library.sample(*inputs, rows, vocabulary, tokens.data_ptr(), log_probs.data_ptr())
        return tokens, log_probs


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory at its address holds its float32 values."""
    plain = (type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)) and tensor.layout == torch.strided
    return plain and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and not tensor.is_neg()


def _has_rows(out: torch.Tensor) -> bool:
    """Whether it is a matrix whose rows are contiguous and do not overlap."""
    return out.dim() == 2 and out.stride(1) == 1 and out.stride(0) >= out.shape[1]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
