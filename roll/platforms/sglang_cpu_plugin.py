"""SGLang's entry point to the CPU platform (group `sglang.srt.platforms`, declared in setup.py).

This module must not import sglang: sglang resolves its platform while it is itself being imported, and on a circular
import it only logs a line and continues without the plug-in. The operators below must be defined before torchvision is
imported: torchvision's CUDA wheel registers kernels for operators that do not exist on a CPU build of torch. SGLang
loads this entry point before torchvision in every child process.
"""

from __future__ import annotations

import importlib.metadata

import torch

PLATFORM_CLASS = "roll.platforms.sglang_cpu_platform:SglangCpuPlatform"

MISSING_OPERATORS = ("nms", "qnms")
"""Operators that only torchvision's compiled library defines, but whose fake kernels it registers at import."""


def activate() -> str | None:
    """Name of the platform class on a machine without GPUs; None on a machine with GPUs."""
    if torch.cuda.is_available():
        return None
    define_torchvision_operators()
    return PLATFORM_CLASS


def define_torchvision_operators() -> None:
    """Makes torchvision, and with it transformers, importable on a CPU build of torch; may be called repeatedly.

    Does nothing if torchvision was built for the CPU, because it then defines the operators itself.
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
"""Holds a reference, because the definitions are removed when the object is deleted."""
