"""DataProto: the samples that driver and workers exchange, as tensors, object arrays and metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

PADDING: dict[str, int] = {"weight_version": -1, "turn_index": -1, "state_ids": -1}
"""Padding value of a column; the columns of other keys are padded with 0."""


class DataProto:
    """Samples: `batch` (tensors, first dimension samples), `non_tensor_batch` (object arrays), `meta_info`.

    Operations return a new object that shares tensors with this one where it can.
    Pickling transfers exactly the visible elements of each tensor, out of band, so that a slice of a large batch is as
    small as its own samples and the object store keeps no second copy.

    Attributes:
        batch: tensors [B, ...]; those of two dimensions and more are [B, T, ...], right padded.
        non_tensor_batch: object arrays [B].
        meta_info: plain values about the whole.
    """

    def __init__(
        self,
        batch: TensorDict,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        """Copies no tensor.

        Raises:
            ValueError: an object array has another length than the batch.
        """
        self.batch = batch
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.meta_info = dict(meta_info or {})
        for key, values in self.non_tensor_batch.items():
            if len(values) != len(self):
                raise ValueError(f"non_tensor_batch[{key!r}] has {len(values)} entries for {len(self)} samples")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Samples from plain dictionaries; the number of samples is the first dimension all of them share.

        Raises:
            ValueError: two entries disagree on the number of samples.
        """
        non_tensors = dict(non_tensors or {})
        sizes = {key: len(value) for key, value in {**tensors, **non_tensors}.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"entries disagree on the number of samples: {sizes}")
        samples = next(iter(sizes.values()), 0)
        objects = {key: _object_array(values) for key, values in non_tensors.items()}
        return cls(TensorDict(dict(tensors), batch_size=[samples]), objects, dict(meta_info or {}))

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __repr__(self) -> str:
        shapes = {key: tuple(value.shape) for key, value in self.tensors().items()}
        objects = sorted(self.non_tensor_batch)
        return f"DataProto({len(self)} samples, {shapes}, objects {objects}, meta {self.meta_info})"

    def __contains__(self, key: str) -> bool:
        return key in self.batch.keys() or key in self.non_tensor_batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as numpy views, so that pickle protocol 5 moves their bytes out of band."""
        tensors = {key: _to_bytes(value) for key, value in self.tensors().items()}
        return _rebuild, (len(self), tensors, self.non_tensor_batch, self.meta_info)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return cast("dict[str, torch.Tensor]", dict(self.batch.items()))

    def select(self, *keys: str) -> DataProto:
        """Only these tensors and object arrays; meta_info stays.

        Raises:
            KeyError: a name is neither.
        """
        self._check(keys)
        return self._with(
            {key: value for key, value in self.tensors().items() if key in keys},
            {key: value for key, value in self.non_tensor_batch.items() if key in keys},
            len(self),
        )

    def select_idxs(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """The samples at these positions, in this order."""
        index = torch.as_tensor(indices, dtype=torch.long)
        positions = index.numpy()
        return self._with(
            {key: value[index] for key, value in self.tensors().items()},
            {key: value[positions] for key, value in self.non_tensor_batch.items()},
            len(index),
        )

    @classmethod
    def concat(cls, parts: Sequence[DataProto]) -> DataProto:
        """Samples of all parts in order; narrower parts are padded on the right to the widest (see `PADDING`).

        The result has no meta_info.

        Raises:
            ValueError: there is no part, or the parts have different keys.
        """
        if not parts:
            raise ValueError("concat of no parts")
        keys, objects = set(parts[0].batch.keys()), set(parts[0].non_tensor_batch)
        for part in parts[1:]:
            if set(part.batch.keys()) != keys or set(part.non_tensor_batch) != objects:
                raise ValueError(f"concat of parts with different keys: {parts[0]!r} and {part!r}")
        tensors = {key: _concat_padded(key, [part.batch[key] for part in parts]) for key in parts[0].tensors()}
        arrays = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in objects}
        return cls(TensorDict(tensors, batch_size=[sum(len(part) for part in parts)]), arrays)

    def reorder(self, indices: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Sample indices[i] at position i.

        Raises:
            ValueError: `indices` is not a permutation.
        """
        index = torch.as_tensor(indices, dtype=torch.long)
        if sorted(index.tolist()) != list(range(len(self))):
            raise ValueError(f"reorder of {len(self)} samples needs a permutation, got {index.tolist()}")
        return self.select_idxs(index)

    def _with(self, tensors: dict[str, torch.Tensor], objects: dict[str, np.ndarray], samples: int) -> DataProto:
        return DataProto(TensorDict(tensors, batch_size=[samples]), objects, self.meta_info)

    def _check(self, keys: Sequence[str]) -> None:
        missing = [key for key in keys if key not in self]
        if missing:
            known = sorted([*self.tensors(), *self.non_tensor_batch])
            raise KeyError(f"no {missing}; the keys are {known}")


def _object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Object array [B] whose elements are never unpacked into a second dimension."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _concat_padded(key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].dim() < 2 or len({tensor.shape[1] for tensor in tensors}) == 1:
        return torch.cat(tensors)
    first, width = tensors[0], max(tensor.shape[1] for tensor in tensors)
    joined = first.new_full((sum(map(len, tensors)), width, *first.shape[2:]), PADDING.get(key, 0))
    row = 0
    for tensor in tensors:
        joined[row : row + len(tensor), : tensor.shape[1]] = tensor
        row += len(tensor)
    return joined


def _to_bytes(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    """Bytes of the visible elements, with the dtype and shape to read them."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def _from_bytes(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor, since `data` may be a read-only view of the object store."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def _rebuild(samples: int, tensors: dict[str, Any], objects: dict[str, np.ndarray], meta: dict[str, Any]) -> DataProto:
    rebuilt = {key: _from_bytes(*value) for key, value in tensors.items()}
    return DataProto(TensorDict(rebuilt, batch_size=[samples]), objects, meta)
