"""Moves the state of a training rank to host memory and back, so that an engine can use the device meanwhile.

Only the storages of tensors are emptied and filled again. Parameters, their views in Megatron's buffers and the
optimizer's references stay what they are, and every value comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from roll.platforms.platform import Platform

StateKind = Literal["parameters", "gradients", "optimizer"]
ALL_STATES: tuple[StateKind, ...] = ("parameters", "gradients", "optimizer")

COPY_TIMEOUT_S = 600.0
"""For the copies of one call; PCIe moves tens of gigabytes in a few seconds."""


@dataclass
class _Emptied:
    """A storage without memory: its size, and its bytes in host memory; None for zeros."""

    storage: torch.UntypedStorage
    size: int
    copy: torch.Tensor | None


class HostCopies:
    """The states of a rank that are in host memory at the moment.

    Gradients are not copied, since every optimizer step starts with zeros. Host memory of a GPU's copies is pinned, for
    speed, and kept for the next time.
    """

    def __init__(self, tensors: Callable[[StateKind], Iterable[torch.Tensor]], platform: Platform) -> None:
        """Copies nothing yet; a storage that the optimizer shares with parameters counts as theirs."""
        self._tensors, self._platform = tensors, platform
        self._emptied: dict[StateKind, list[_Emptied]] = {}
        self._pinned: dict[int, torch.Tensor] = {}

    def require(self, *kinds: StateKind) -> None:
        """Raises a RuntimeError if one of these states is in host memory."""
        absent = [kind for kind in kinds if kind in self._emptied]
        if absent:
            raise RuntimeError(
                f"{' and '.join(absent)} of this rank are in host memory; load_states moves them to the device"
            )

    @torch.no_grad()
    def offload(self, kinds: Sequence[StateKind]) -> int:
        """Moves these states to host memory, unless they are there already.

        Returns:
            Bytes of the device that are free now and were not before.
        """
        moved = {
            kind: [self._copied(kind, storage) for storage in self._storages(kind)]
            for kind in kinds
            if kind not in self._emptied
        }
        self._platform.wait_for_device(COPY_TIMEOUT_S)
        for kind, entries in moved.items():
            self._emptied[kind] = entries
            for each in entries:
                each.storage.resize_(0)
        self._platform.release_cached_memory()
        return sum(each.size for entries in moved.values() for each in entries)

    @torch.no_grad()
    def load(self, kinds: Sequence[StateKind]) -> int:
        """Brings these states back to the device; returns the bytes that they take there.

        The copies are kept until all are back, so a call that failed, for want of memory for example, can be repeated.
        """
        loaded = [each for kind in kinds for each in self._emptied.get(kind, [])]
        for each in loaded:
            each.storage.resize_(each.size)
            bytes_of = _bytes_of(each.storage)
            if each.copy is None:
                bytes_of.zero_()
            else:
                bytes_of.copy_(each.copy, non_blocking=True)
        self._platform.wait_for_device(COPY_TIMEOUT_S)
        for kind in kinds:
            self._emptied.pop(kind, None)
        return sum(each.size for each in loaded)

    def _storages(self, kind: StateKind) -> Iterator[torch.UntypedStorage]:
        """Each storage of a state on the device once, without those of parameters in other states.

        Megatron keeps an optimizer with `optimizer_cpu_offload` in host memory anyway.
        """
        seen = (
            {tensor.untyped_storage()._cdata for tensor in self._tensors("parameters")}
            if kind != "parameters"
            else set()
        )
        for tensor in self._tensors(kind):
            storage = tensor.untyped_storage()
            on_device = storage.device.type == self._platform.device_type
            if on_device and storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield storage

    def _copied(self, kind: StateKind, storage: torch.UntypedStorage) -> _Emptied:
        if kind == "gradients":
            return _Emptied(storage, storage.nbytes(), None)
        copy = self._pinned.get(storage._cdata)
        if copy is None or copy.nbytes != storage.nbytes():
            pinned = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            if pinned:
                self._pinned[storage._cdata] = copy
        copy.copy_(_bytes_of(storage), non_blocking=True)
        return _Emptied(storage, storage.nbytes(), copy)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
