"""The root-mean-square norm, with a backward pass written out for the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The norm x / sqrt(mean(x^2) + epsilon) * weight over the last dimension.

    On a CPU torch has no fused kernel and differentiates its parts one by one; for fp32 the gradient is written out
    here, which takes half the time. Elsewhere torch's own operator runs.

    Args:
        x: [..., H].
        weight: [H].
        epsilon: added to the mean square.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return _RMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """With u = x * scale: dw = sum(g u), dx = scale (g w - u mean(g w u))."""
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        product = (gradient * unit).flatten(0, -2)
        mean = torch.mv(product, weight).div_(x.shape[-1]).view(scale.shape)
        weight_gradient = product.sum(0)
        x_gradient = torch.mul(gradient, weight).sub_(unit.mul_(mean)).mul_(scale)
        return x_gradient, weight_gradient, None
