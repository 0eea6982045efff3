"""Loads checkpoints without running code that their files name."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable of torch that overrides `weights_only=False`."""

DTYPE_NAMES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")

METADATA_CLASSES = {
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *DTYPE_NAMES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
"""What torch's description of a checkpoint is made of. It is a pickle, which torch would load with any
class or function that it names; so it is read with these alone first."""


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuses what is not in METADATA_CLASSES."""
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_metadata(path: Path) -> None:
    """Reads torch's `.metadata` file without running any code that it names.

    Raises:
        ValueError: it names other classes or functions than METADATA_CLASSES, or is not a pickle.
    """
    try:
        with path.open("rb") as file:
            _MetadataReader(file).load()
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        ValueError,
        TypeError,
    ) as error:
        raise ValueError(f"{path}: is not the metadata of a checkpoint: {error}") from error


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """Inside, torch.load takes tensors and plain data only, also where a library asks it for any object."""
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[WEIGHTS_ONLY]
        else:
            os.environ[WEIGHTS_ONLY] = before
