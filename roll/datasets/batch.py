"""Batch: the samples that driver and workers exchange, as tensors, object arrays and metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

ROUTING = "routing"
"""Column of `non_tensor_batch`: the experts of each token of a sample [tokens, layers, k], as in its trajectory."""


POLICY = "policy"
"""Which of several policies: the column of a batch, and the name in `meta_info` of a call."""


class Batch:
    """Samples; operations return a new object that shares tensors with this one where it can.

    Pickling transfers exactly the visible elements of each tensor, out of band, so that a slice of a large batch is as
    small as its own samples and the object store keeps no second copy.

    Attributes:
        batch: tensors [B, ...]; those of two dimensions and more are [B, T, ...], right padded.
        non_tensor_batch: object arrays [B].
        meta_info: plain values about the whole.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies no tensor; the number of samples is the first dimension that all entries share.

        Raises:
            ValueError: two entries disagree on the number of samples.
        """
        self.non_tensor_batch = {key: _object_array(values) for key, values in (non_tensors or {}).items()}
        self.meta_info = dict(meta_info or {})
        entries: dict[str, Sized] = {**tensors, **self.non_tensor_batch}
        sizes = {key: len(value) for key, value in entries.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries disagree on the number of samples: {sizes}")
        self.batch = TensorDict(dict(tensors.items()), batch_size=[next(iter(sizes.values()), 0)])

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __contains__(self, key: str) -> bool:
        return key in self.batch.keys() or key in self.non_tensor_batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as numpy views, so that pickle protocol 5 moves their bytes out of band."""
        tensors = {key: _to_bytes(value) for key, value in self.tensors().items()}
        return _rebuild, (tensors, self.non_tensor_batch, self.meta_info)

    def tensors(self) -> dict[str, torch.Tensor]:
        return cast("dict[str, torch.Tensor]", dict(self.batch.items()))

    def adding(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """These samples with further tensors, or others in place of their own."""
        return Batch(self.tensors() | dict(tensors), self.non_tensor_batch, self.meta_info)

    def without(self, *keys: str) -> Batch:
        tensors = {key: value for key, value in self.tensors().items() if key not in keys}
        return Batch(tensors, self.non_tensor_batch, self.meta_info)

    def select(self, *keys: str) -> Batch:
        """These tensors alone; KeyError where there is no such tensor."""
        return Batch({key: self.batch[key] for key in keys})

    def with_column(self, key: str, of: Batch) -> Batch:
        """These samples with a column of `of`, which has the same; unchanged where there is none."""
        columns = {key: of.non_tensor_batch[key]} if key in of.non_tensor_batch else {}
        return Batch(self.tensors(), self.non_tensor_batch | columns, self.meta_info)

    def select_idxs(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> Batch:
        """The samples at these positions, in this order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        tensors = {key: value[index] for key, value in self.tensors().items()}
        columns = {key: values[index.numpy()] for key, values in self.non_tensor_batch.items()}
        return Batch(tensors, columns, self.meta_info)

    @staticmethod
    def join(parts: Sequence[Batch], order: Sequence[int]) -> Batch:
        """All parts: sample order[i] of the parts, one after the other, at position i."""
        index = torch.tensor(order, dtype=torch.long)
        tensors = {key: torch.cat([part.batch[key] for part in parts])[index] for key in parts[0].tensors()}
        columns = {key: [part.non_tensor_batch[key] for part in parts] for key in parts[0].non_tensor_batch}
        return Batch(tensors, {key: np.concatenate(values)[index.numpy()] for key, values in columns.items()})


def _object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Object array [B] whose elements are never unpacked into a second dimension."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return values
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _to_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _from_bytes(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor, since `data` may be a read-only view of the object store."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def _rebuild(tensors: dict[str, Any], objects: dict[str, np.ndarray], meta: dict[str, Any]) -> Batch:
    return Batch({key: _from_bytes(*value) for key, value in tensors.items()}, objects, meta)
