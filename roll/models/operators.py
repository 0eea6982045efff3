"""Torch operators of a decoder with backward passes that are faster on CPU: norm, activation, rotation, rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from roll.models.families.shape import RotaryConfig


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    On a CPU torch has no fused kernel and differentiates the parts one by one; for fp32 the gradient is written out
    here, which takes half the time. Other devices and dtypes use torch's operator.

    Args:
        x: [..., H].
        weight: [H].
        epsilon: added to the mean square.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        result: torch.Tensor = _RMSNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
        return result
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: torch.Tensor = (x * scale).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """With u = x * scale: dw = sum(g u), dx = scale (g w - u mean(g w u))."""
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = (gradient * unit).flatten(0, -2)
        mean = torch.mv(product, weight).div_(x.shape[-1]).view(scale.shape)
        weight_gradient = product.sum(0)
        x_gradient = torch.mul(gradient, weight).sub_(unit.mul_(mean)).mul_(scale)
        return x_gradient, weight_gradient, None


def rotary_frequencies(rotary: RotaryConfig, head_size: int) -> torch.Tensor:
    """Angle per position of each pair of rotated channels, [head_size x share / 2] float32.

    f_i = base^(-2i / (head_size x share)). Kind `linear` divides all by the factor; kind `llama3` divides those whose
    wavelength exceeds original_positions / low_frequency_factor, keeps those below original_positions /
    high_frequency_factor, and blends linearly (in turns over original_positions) between.
    """
    rotated = int(head_size * rotary.share)
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    frequencies = 1.0 / (rotary.base**exponent)
    if rotary.kind == "default":
        return frequencies
    if rotary.kind == "linear":
        return frequencies / rotary.factor
    turns = rotary.original_positions * frequencies / (2 * math.pi)
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rotary.factor


class RotaryTable:
    """Cosines and sines of the positions used so far, shared by all layers of a model.

    Args:
        frequencies: [R / 2] float32, on the model's device; of D channels of a head the first R are rotated.
        pairs: a rotation is of channels 2i and 2i + 1, and not of i and i + R/2.
    """

    def __init__(self, frequencies: torch.Tensor, pairs: bool = False) -> None:
        self._frequencies, self._pairs = frequencies, pairs
        self._tables: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def rotate(self, x: torch.Tensor, positions: torch.Tensor | None = None, longest: int = 0) -> torch.Tensor:
        """Rotates each channel pair i of position s by s f_i; [S, B, N, D] to [B, N, S, D] contiguous.

        Args:
            x: [S, B, N, D].
            positions: [S], each below S or `longest`; None is 0 to S - 1.
            longest: above every position.
        """
        length = max(x.shape[0], longest)
        if x.dtype not in self._tables or self._tables[x.dtype][0].shape[0] < length:
            known = torch.arange(1 << (length - 1).bit_length(), device=x.device, dtype=torch.float32)
            angles = torch.outer(known, self._frequencies)
            self._tables[x.dtype] = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cosine, sine = self._tables[x.dtype]
        cosine, sine = (table[: x.shape[0]] if positions is None else table[positions] for table in (cosine, sine))
        rotated: torch.Tensor = _Rotate.apply(x, cosine, sine, self._pairs)  # type: ignore[no-untyped-call]
        return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, pairs: bool) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.pairs = pairs
        length, batch, heads, size = x.shape
        rotated = x.new_empty(batch, heads, length, size)
        _rotate_into(x.permute(1, 2, 0, 3), cosine, sine, 1.0, rotated, pairs)
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        batch, heads, length, size = gradient.shape
        back = gradient.new_empty(length, batch, heads, size)
        _rotate_into(gradient, cosine, sine, -1.0, back.permute(1, 2, 0, 3), ctx.pairs)
        return back, None, None, None


def _rotate_into(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, direction: float, out: torch.Tensor, pairs: bool
) -> None:
    """Writes the rotation of [B, N, S, D] by +angle (direction 1) or -angle (direction -1) to `out`."""
    rotated = 2 * cosine.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:].copy_(x[..., rotated:])
        x, out = x[..., :rotated], out[..., :rotated]
    first, second, out_first, out_second = (part for each in (x, out) for part in _of_pairs(each, pairs))
    torch.mul(first, cosine, out=out_first)
    out_first.addcmul_(second, sine, value=-direction)
    torch.mul(second, cosine, out=out_second)
    out_second.addcmul_(first, sine, value=direction)


def _of_pairs(x: torch.Tensor, neighbours: bool) -> tuple[torch.Tensor, ...]:
    """The first channels of all rotations, and the second ones, as views."""
    return (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows [N] of [S, ...], as [N, ...]; a row that is taken several times adds up the gradients in fp32.

    `F.embedding`, because on a CPU its gradient is faster than that of `index_select`, and adds in a fixed order.
    """
    taken = F.embedding(rows, x.flatten(1).float()).to(x.dtype)
    return taken.view(-1, *x.shape[1:])


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up [..., F] of [gate, up] [..., 2F].

    The gradient is written into one [..., 2F] tensor; autograd would make two and concatenate them.
    """
    result: torch.Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        joined = torch.empty_like(x)
        of_gate, of_up = joined.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return joined
