"""Loads checkpoints without running code that their files name."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from roll.base.errors import RunError

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


STATEFUL = {"torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata"}
"""Modules whose classes alone have instances that a pickle may set attributes of, enumerations excepted."""


class MetadataError(RunError, ValueError):
    """A file is not torch's description of a checkpoint, or names what such a description does not."""


class _MetadataReader(pickle._Unpickler):  # in Python: that in C sets attributes of any object
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch}
    stack: list[Any]
    memo: dict[int, Any]

    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def _build(self) -> None:
        kind = type(self.stack[-2])
        if kind.__module__ not in STATEFUL or issubclass(kind, enum.Enum):
            raise pickle.UnpicklingError(f"it sets attributes of {self.stack[-2]!r}")
        build: Any = super().dispatch[pickle.BUILD[0]]
        build(self)

    def _byte_array(self) -> None:
        raise pickle.UnpicklingError("it has a bytearray, whose memory would be allocated before it is read")

    dispatch[pickle.BUILD[0]], dispatch[pickle.BYTEARRAY8[0]] = _build, _byte_array


def check_metadata(path: Path) -> None:
    """Reads torch's `.metadata` file without running any code that it names, in memory in proportion to its size.

    Raises:
        MetadataError: it names other classes or functions than METADATA_CLASSES, sets attributes of other objects than
            their instances, or is not a pickle of a checkpoint's metadata.
    """
    try:
        content = path.read_bytes()
        reader = _MetadataReader(io.BytesIO(content))
        found = type(reader.load()).__name__
        if found != "Metadata":
            raise pickle.UnpicklingError(f"it holds a {found}")
        if max(reader.memo, default=0) > len(content):  # torch's reader, in C, allocates so many places
            raise pickle.UnpicklingError("its memo has gaps")
    except Exception as error:  # a damaged pickle may raise any
        cause = str(error) if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"
        raise MetadataError(f"{path}: is not the metadata of a checkpoint: {cause}") from error


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
