"""What differs between a machine with accelerators and one without.

`base` says what a platform answers, `cpu` and `cuda` answer it. `megatron_cpu` is the one place that makes
Megatron-Core run without CUDA; the `sglang_cpu_*` modules do the same for SGLang. This module imports torch only
inside its functions, because SGLang loads the plug-in beside it while it is itself being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.platforms.platform import Platform

PLATFORM_NAMES = ("cpu", "cuda")


def detect() -> str:
    """`cuda` on a machine where torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def get_platform(name: str = "auto") -> Platform:
    """The platform of that name; `auto` is what `detect` finds.

    Raises:
        ValueError: there is no such platform.
    """
    name = detect() if name == "auto" else name
    if name == "cpu":
        from roll.platforms.platform import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from roll.platforms.platform import CudaPlatform

        return CudaPlatform()
    raise ValueError(f"platform: {name!r} is unknown; use auto, {' or '.join(PLATFORM_NAMES)}")
