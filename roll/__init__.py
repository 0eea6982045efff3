"""Post-training of language models: Megatron-Core trains, SGLang generates, Ray connects them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roll.base.installation import check_installation

if TYPE_CHECKING:
    from roll.api.open import open_run as open  # noqa: F401
    from roll.api.responses import Response as Response
    from roll.api.train import train as train

__version__ = "0.1.0"

check_installation()

_API = {"open": ("open", "open_run"), "Response": ("responses", "Response"), "train": ("train", "train")}
"""Names of this package -> the module of `roll.api` that has each, and its name there."""


def __getattr__(name: str) -> Any:
    """`roll.open`, `roll.train` and `roll.Response`, which are imported when they are asked for."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _API[name]
    return getattr(import_module(f"roll.api.{module}"), attribute)
