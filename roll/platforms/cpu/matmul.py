"""Float32 matrix products of a CPU by a kernel of the project, where torch's are slow.

torch multiplies float32 matrices with MKL, which uses half the width of a processor that is not Intel's: a core of an
EPYC with AVX-512 does 105 GFLOP/s with it and 200 to 260 with `cpp/linear.h`. oneDNN, which torch contains too, is as
fast for large matrices, but slower for gradients of weights, and compiles a kernel for each new shape, in half a
millisecond: numbers of tokens are new in every batch.

`ROLL_CPU_MATMUL` in the environment of a process is `auto`, the default, `kernel` or `mkl`.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Protocol

import torch

from roll.platforms.cpu.kernels import CpuKernels, is_plain
from roll.platforms.cpu.library import BuildError

logger = logging.getLogger(__name__)

VARIABLE = "ROLL_CPU_MATMUL"
CHOICES = ("auto", "kernel", "mkl")

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""

ANY_HEAD = 64
"""The kernels are built for a size of heads; products do not depend on it."""

INSTALLED: dict[str, Any] = {}
"""Full name of each replaced function -> torch's."""


class Product(Protocol):
    """`CpuKernels.linear`."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Input [..., K], weight [N, K], bias [N] -> [..., N], into `out` if there is one."""


def use_fast_matmul(product: Product | None = None) -> bool:
    """Makes `matmul` and `linear` of this process use the kernel where it is faster; whether torch's are replaced.

    A second call does nothing. With a product, an engine's, that is used on any processor. Products that need a
    gradient, or whose tensors are not float32 on a CPU, stay with torch, and so do shapes that do not fit, for torch's
    error. Megatron's linears and the log-prob operator multiply in autograd functions of their own, where no gradient
    is recorded.

    Raises:
        ValueError: ROLL_CPU_MATMUL is none of CHOICES.
    """
    choice = os.environ.get(VARIABLE, CHOICES[0])
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r}: use one of {', '.join(CHOICES)}")
    if choice == "mkl" or (product is None and choice == "auto" and not mkl_is_slow()):
        return False
    if INSTALLED:
        return True
    try:
        multiply: Product = product or CpuKernels(ANY_HEAD).linear
    except BuildError as error:
        logger.warning("matrices are multiplied by MKL, which is half as fast on this processor: %s", error)
        return False
    tensor, functional = torch.Tensor, torch.nn.functional
    matmul, method, linear = torch.matmul, tensor.matmul, functional.linear
    INSTALLED.update({"torch.matmul": matmul, "torch.Tensor.matmul": method, "torch.nn.functional.linear": linear})

    def fast_matmul(input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if other.dim() == 2 and _takes(input, other.t(), out=out):
            return multiply(input, other.t(), None, out)
        return matmul(input, other) if out is None else matmul(input, other, out=out)

    def fast_method(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if other.dim() == 2 and _takes(self, other.t()):
            return multiply(self, other.t(), None)
        return method(self, other)

    def fast_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.dim() == 2 and _takes(input, weight, bias):
            return multiply(input, weight, bias)
        return linear(input, weight, bias)

    torch.matmul, functional.linear = fast_matmul, fast_linear
    tensor.matmul = fast_method  # type: ignore[method-assign, assignment]
    return True


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
    """Whether the kernel multiplies x [..., K] and weight [N, K], plus a bias [N], into out [..., N].

    It does if they fit and are not empty, float32 on a CPU, not under autocast, and without a gradient to record.
    """
    if x.dim() < 2 or x.shape[-1] != weight.shape[1] or not x.numel() or not weight.numel():
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if out is not None and out.shape != (*x.shape[:-1], weight.shape[0]):
        return False
    tensors = [tensor for tensor in (x, weight, bias, out) if tensor is not None]
    if not all(map(is_plain, tensors)):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
