"""`torch` and `Tensor` for files with options beside formulas: torch is imported at the first operation.

So the keys, names and traits of all algorithms are read without it, and commands that only read a YAML start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    Tensor = Any

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
