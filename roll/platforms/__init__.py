"""What differs between a machine with GPUs and one without.

`platform` defines the interface and its CPU and CUDA implementations. `megatron_cpu` patches torch so that
Megatron-Core runs without CUDA; the `sglang_cpu_*` modules are SGLang's plug-in for CPU; `shared_memory` passes tensors
between processes of a node. Nothing imported here may import torch at import time, because SGLang loads
`sglang_cpu_plugin` while it is itself being imported.
"""

from roll.platforms.platform import CpuPlatform, CudaPlatform, Platform, detect, get_platform

__all__ = ["CpuPlatform", "CudaPlatform", "Platform", "detect", "get_platform"]
