"""Post-training of language models: Megatron-Core trains, SGLang generates, Ray connects them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.api.train import train as train

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`roll.train`, which is imported when it is asked for."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roll.api.train import train

    return train
