"""States of a training rank go to host memory and come back: the same tensors, the same bits, and no memory between."""

from __future__ import annotations

import random

import pytest
import torch

from roll.distributed.train.host_copies import ALL_STATES, HostCopies
from roll.platforms import get_platform


class Rank:
    """A buffer of two parameters, one of which the optimizer updates in place; a master copy, moments and gradients."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.buffer = torch.randn(12, generator=generator)
        self.first, self.second = self.buffer[:8].view(2, 4), self.buffer[8:]
        self.half = torch.randn(5, generator=generator).bfloat16()
        self.master, self.moment = self.half.float(), torch.rand(5, generator=generator)
        self.gradients = torch.randn(17, generator=generator)
        self.copies = HostCopies(self.tensors, get_platform("cpu"))

    def tensors(self, kind: str) -> list[torch.Tensor]:
        return {
            "parameters": [self.first, self.second, self.half],
            "gradients": [self.gradients],
            "optimizer": [self.first, self.master, self.moment, torch.zeros(0)],
        }[kind]

    def bytes(self) -> int:
        """Bytes of the states that the rank has on its device."""
        held = (self.buffer, self.half, self.master, self.moment, self.gradients)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_states_come_back_bit_for_bit_into_the_same_tensors() -> None:
    rank, draws = Rank(), random.Random(7)
    before = [tensor.clone() for tensor in (rank.buffer, rank.half, rank.master, rank.moment)]
    for _ in range(10):
        rank.copies.offload(ALL_STATES)
        rank.copies.load(draws.sample(ALL_STATES, 3))
    after = (rank.buffer, rank.half, rank.master, rank.moment)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert rank.first.data_ptr() == rank.buffer.data_ptr() and rank.second.tolist() == rank.buffer[8:].tolist()
    assert not rank.gradients.any()


def test_what_is_offloaded_takes_no_memory_and_is_counted_once() -> None:
    rank = Rank()
    whole = rank.bytes()
    optimizer = rank.master.nbytes + rank.moment.nbytes
    assert rank.copies.offload(["optimizer", "gradients"]) == optimizer + rank.gradients.nbytes
    assert rank.bytes() == rank.buffer.nbytes + rank.half.nbytes
    assert rank.copies.offload(ALL_STATES) == rank.buffer.nbytes + rank.half.nbytes
    assert rank.copies.offload(ALL_STATES) == rank.bytes() == 0
    assert rank.copies.load(["parameters"]) == rank.bytes()
    assert rank.copies.load(ALL_STATES) == optimizer + rank.gradients.nbytes
    assert rank.copies.load(ALL_STATES) == 0 and rank.bytes() == whole


class NoMemory(RuntimeError):
    """The device is full."""


@pytest.mark.parametrize("direction", ["offload", "load"])
def test_a_call_that_failed_loses_nothing_and_can_be_repeated(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    before, whole = rank.buffer.clone(), rank.bytes()
    if direction == "load":
        rank.copies.offload(ALL_STATES)
    platform, calls = type(rank.copies._platform), []

    def fail_once(platform: object, timeout_s: float) -> None:
        calls.append(timeout_s)
        if len(calls) == 1:
            raise NoMemory

    monkeypatch.setattr(platform, "wait_for_device", fail_once)
    with pytest.raises(NoMemory):
        getattr(rank.copies, direction)(ALL_STATES)
    if direction == "load":
        with pytest.raises(RuntimeError, match="are in host memory"):
            rank.copies.require("parameters")
    assert getattr(rank.copies, direction)(ALL_STATES) == whole
    rank.copies.load(ALL_STATES)
    assert torch.equal(rank.buffer, before) and rank.bytes() == whole


def test_states_that_are_away_cannot_be_used() -> None:
    rank = Rank()
    rank.copies.require(*ALL_STATES)
    rank.copies.offload(["gradients", "optimizer"])
    rank.copies.require("parameters")
    with pytest.raises(RuntimeError, match="gradients and optimizer of this rank are in host memory; load_states"):
        rank.copies.require(*ALL_STATES)
