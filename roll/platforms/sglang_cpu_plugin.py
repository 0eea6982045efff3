"""Entry point through which SGLang finds the CPU platform (group `sglang.srt.platforms`).

Two rules. This module must not import sglang: sglang resolves its platform while it is itself being imported, and a
circular import would lose the plug-in with nothing but a log line. And the operators below must exist before
torchvision is imported, because torchvision's wheel is built for CUDA and on a CPU build of torch it declares
kernels for operators that nobody defined. SGLang loads this entry point before torchvision, in every child process.
"""

from __future__ import annotations

import importlib.metadata

import torch

PLATFORM_CLASS = "roll.platforms.sglang_cpu_platform:SglangCpuPlatform"

MISSING_OPERATORS = ("nms", "qnms")
"""Operators whose fake kernels torchvision registers at import although only its compiled library defines them."""


def activate() -> str | None:
    """Name of the platform class for a machine without an accelerator; None leaves an accelerator's machine alone."""
    if torch.cuda.is_available():
        return None
    define_torchvision_operators()
    return PLATFORM_CLASS


def define_torchvision_operators() -> None:
    """Lets torchvision, and with it transformers, be imported on a CPU build of torch; may be called twice.

    A torchvision that was built for the CPU defines the operators itself and is left alone.
    """
    global _library
    if _library is not None or not _torchvision_is_for_cuda():
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in MISSING_OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _torchvision_is_for_cuda() -> bool:
    try:
        return not importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


_library: torch.library.Library | None = None
"""Keeps the definitions alive: they vanish with the object."""
