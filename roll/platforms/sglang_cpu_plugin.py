"""SGLang's entry point to the CPU platform (group `sglang.srt.platforms`, declared in setup.py).

This module must not import sglang: sglang resolves its platform while it is itself being imported, and on a circular
import it only logs a line and continues without the plug-in.
"""

from __future__ import annotations

import torch

PLATFORM_CLASS = "roll.platforms.sglang_cpu_platform:SglangCpuPlatform"


def activate() -> str | None:
    """Name of the platform class on a machine without GPUs; None on a machine with GPUs."""
    return None if torch.cuda.is_available() else PLATFORM_CLASS
