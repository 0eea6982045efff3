"""What differs between a machine with GPUs and one without.

`platform` defines the interface and its CPU and CUDA implementations; `cpu/` runs the engines on a CPU, and
`sglang_cpu_plugin` is what SGLang loads of it while SGLang is being imported: so nothing imported here may import torch
at import time.
"""

from roll.platforms.platform import CpuPlatform, CudaPlatform, Platform, detect, get_platform

__all__ = ["CpuPlatform", "CudaPlatform", "Platform", "detect", "get_platform"]
