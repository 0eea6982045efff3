"""The gated activation of the MLP on a fused gate and up projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2F] = [gate, up]; [..., F].

    The gradient is written into one [..., 2F] tensor, where autograd would make two and join them.
    """
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        joined = torch.empty_like(x)
        of_gate, of_up = joined.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return joined
