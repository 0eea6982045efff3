"""Float32 matrix products by oneDNN, on processors for which torch's MKL has no AVX-512 code.

torch multiplies float32 matrices with MKL, which uses half the width of a processor that is not Intel's: a core of an
EPYC with AVX-512 does 105 GFLOP/s with it and 180 to 250 with oneDNN, which torch contains too. Both add in float32, in
another order. oneDNN compiles a kernel for each new shape, in half a millisecond, and keeps the last 1,024.

`ROLL_CPU_MATMUL` in the environment of a process is `auto`, the default, `onednn` or `mkl`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

VARIABLE = "ROLL_CPU_MATMUL"
CHOICES = ("auto", "onednn", "mkl")

SMALLEST = 1 << 20
"""Multiplications of a product from which on oneDNN is faster; below it, its call takes longer than it saves."""

ROWS = 64
"""Packed micro-batches are padded to a multiple of so many tokens: shapes repeat, and with them oneDNN's kernels."""

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""

INSTALLED: dict[str, Any] = {}
"""Full name of each replaced function -> torch's."""


def install() -> bool:
    """Makes `matmul` and `linear` of this process use oneDNN where it is faster; a second call does nothing.

    Products that need a gradient, or whose tensors are not float32 on a CPU, stay with torch, and so do shapes that
    do not fit, for torch's error. Megatron's linears and the log-prob operator multiply in autograd functions of their
    own, where no gradient is recorded.

    Returns:
        Whether oneDNN is used.

    Raises:
        ValueError: ROLL_CPU_MATMUL is none of CHOICES.
    """
    choice = os.environ.get(VARIABLE, CHOICES[0])
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r}: use one of {', '.join(CHOICES)}")
    if choice == "mkl" or not available() or (choice == "auto" and not mkl_is_slow()):
        return False
    if INSTALLED:
        return True
    tensor, functional = torch.Tensor, torch.nn.functional
    matmul, method, linear = torch.matmul, tensor.matmul, functional.linear
    INSTALLED.update({"torch.matmul": matmul, "torch.Tensor.matmul": method, "torch.nn.functional.linear": linear})

    def fast_matmul(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if other.dim() == 2 and _takes(input, other.t(), out=out):
            product = multiply(input, other.t())
            return product if out is None else out.copy_(product)
        return matmul(input, other) if out is None else matmul(input, other, out=out)

    def fast_method(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if other.dim() == 2 and _takes(self, other.t()):
            return multiply(self, other.t())
        return method(self, other)

    def fast_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.dim() == 2 and _takes(input, weight, bias):
            return multiply(input, weight, bias)
        return linear(input, weight, bias)

    torch.matmul, functional.linear = fast_matmul, fast_linear
    tensor.matmul = fast_method  # type: ignore[method-assign, assignment]
    return True


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Input [..., K] times the transposed weight [N, K], plus a bias [N], in float32 by oneDNN; without gradient."""
    bias = None if bias is None else bias.contiguous()  # whose strides torch does not pass on
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def available() -> bool:
    """Whether torch has oneDNN's product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def mkl_is_slow() -> bool:
    """Whether the processor has AVX-512 and MKL does not use it, which it does on Intel's only."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.split() for key, value in fields.items()}
    return named.get("vendor_id", ["GenuineIntel"]) != ["GenuineIntel"] and "avx512f" in named.get("flags", [])


def _takes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> bool:
    """Whether oneDNN multiplies x [..., K] and weight [N, K], plus a bias [N], into out [..., N].

    It does if they are large enough, float32 on a CPU, not under autocast, and without a gradient to record.
    """
    if x.dim() < 2 or x.numel() * weight.shape[0] < SMALLEST or x.shape[-1] != weight.shape[1]:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if out is not None and out.shape != (*x.shape[:-1], weight.shape[0]):
        return False
    tensors = [tensor for tensor in (x, weight, bias, out) if tensor is not None]
    if any(each.dtype != torch.float32 or each.device.type != "cpu" for each in tensors):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
