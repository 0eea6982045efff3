"""Deltas: what is encoded is decoded to the same bits, and what does not fit is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll.distributed.infer.sglang_checksums import checksum
from roll.distributed.weights import delta as module
from roll.distributed.weights.delta import DeltaError, RankDelta, encoded, load_delta
from roll.distributed.weights.delta_sender import EngineDeltas
from roll.models.families.shape import model_shape


def model_of(values: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(values.clone().view(-1, 1), requires_grad=False))
    return model


def delta_of(old: torch.Tensor, new: torch.Tensor) -> RankDelta:
    found = list(encoded("w", old, new))
    return RankDelta(tuple(piece for piece, _ in found), b"".join(data.numpy().tobytes() for _, data in found))


@contextmanager
def pieces_of(size: int) -> Iterator[None]:
    with patch.object(module, "PIECE", size):
        yield


def random_values(size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=150)
@given(
    size=st.integers(1, 70_000 * 2),
    changed=st.lists(st.integers(0, 70_000 * 2), max_size=40),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.3, 0.9]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    piece=st.sampled_from([1 << 24, 1000]),
)
@example(size=140_000, changed=[0, 65_536, 131_072, 139_999], share=0.0, dtype=torch.bfloat16, piece=1 << 24)
@example(size=600, changed=[255, 511, 512, 599], share=0.0, dtype=torch.bfloat16, piece=1 << 24)
def test_a_loaded_delta_gives_the_new_bits(
    size: int, changed: list[int], share: float, dtype: torch.dtype, piece: int
) -> None:
    old = random_values(size, 1, dtype)
    moved = torch.rand(size, generator=torch.Generator().manual_seed(2)) < share
    moved[[each % size for each in changed]] = True
    new = torch.where(moved, random_values(size, 3, dtype), old)
    with pieces_of(piece):
        delta = delta_of(old, new)
    delta.check()
    model = model_of(old)
    load_delta(model, [delta.named_tensor()])
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    assert torch.equal(model.get_parameter("w").view(-1).view(bits), new.view(bits))
    assert len(delta.data) <= new.nbytes, "never more than all values"
    assert bool(delta.pieces) == bool((old.view(bits) != new.view(bits)).any())


def test_zero_and_nan_are_compared_by_their_bits() -> None:
    old, new = torch.tensor([0.0, float("nan"), 1.0]).bfloat16(), torch.tensor([-0.0, float("nan"), 1.0]).bfloat16()
    assert [piece.count for piece, _ in encoded("w", old, new)] == [1]
    assert list(encoded("w", new, new)) == []


@pytest.mark.parametrize(("every", "most"), [(10, 3.0), (200, 3.0), (1000, 4.0), (50_000, 4.0)])
def test_bytes_of_a_changed_value(every: int, most: float) -> None:
    """Two of the value, and one or two of the gap."""
    old = random_values(1_000_000, 1, torch.bfloat16)
    new = old.clone()
    new[::every] += 1
    assert len(delta_of(old, new).data) <= most * (1_000_000 // every)


def test_a_delta_that_ends_beyond_its_parameter_or_lacks_bytes_is_refused() -> None:
    old = random_values(1000, 1, torch.bfloat16)
    new = old.clone()
    new[[3, 999]] += 1
    delta = delta_of(old, new)
    shifted = replace(delta, data=bytes([delta.data[0] + 1]) + delta.data[1:])
    with pytest.raises(DeltaError, match="w: the delta ends at value 1001 of 1000"):
        shifted.check()
    with pytest.raises(DeltaError, match=r"the delta has \d+ bytes instead of \d+"):
        replace(delta, data=delta.data[:-1]).check()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (model_of(torch.zeros(999).bfloat16()), "no such parameter of 1000 values in bfloat16"),
        (model_of(torch.zeros(1000)), "no such parameter of 1000 values in bfloat16"),
        (torch.nn.Module(), "no such parameter"),
    ],
)
def test_an_engine_with_another_parameter_refuses_the_delta(model: torch.nn.Module, message: str) -> None:
    old = torch.zeros(1000).bfloat16()
    new = old.clone()
    new[7] = 1
    with pytest.raises(DeltaError, match=message):
        load_delta(model, [delta_of(old, new).named_tensor()])


def test_values_in_another_order_are_not_written() -> None:
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(4, 250).bfloat16().t(), requires_grad=False))
    old = torch.zeros(1000).bfloat16()
    new = old.clone()
    new[7] = 1
    with pytest.raises(DeltaError, match="in another order"):
        load_delta(model, [delta_of(old, new).named_tensor()])
    assert not model.get_parameter("w").any()


LAYER = "model.layers.0."
MODEL = model_shape(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "vocab_size": 120,
    }
)
SHAPES = {
    "model.embed_tokens.weight": (120, 8),
    f"{LAYER}self_attn.q_proj.weight": (8, 8),
    f"{LAYER}self_attn.k_proj.weight": (4, 8),
    f"{LAYER}self_attn.v_proj.weight": (4, 8),
    f"{LAYER}self_attn.o_proj.weight": (8, 8),
    f"{LAYER}mlp.gate_proj.weight": (8, 8),
    f"{LAYER}mlp.up_proj.weight": (8, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 8),
    "model.norm.weight": (8,),
}


class EngineRank:
    """The parameters of one rank of an engine, at first zeros of the size that the first delta says."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.parameters.items()]

    def load(self, delta: RankDelta) -> None:
        for piece in delta.pieces:
            self.parameters.setdefault(piece.name, torch.zeros(piece.size).bfloat16())
        model: Any = self
        load_delta(model, [delta.named_tensor()])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_an_engine_have_the_parameters_of_the_checksums_after_each_delta(ranks: int) -> None:
    """Fused and split parameters, a padded vocabulary, more ranks than key-value heads, and parts in two buckets."""
    weights = {name: random_values(math.prod(shape), 1, torch.bfloat16).view(shape) for name, shape in SHAPES.items()}
    kept = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    engine = [EngineRank() for _ in range(ranks)]
    for update in range(4):
        deltas = EngineDeltas(MODEL, ranks, kept)
        for name, tensor in weights.items():
            deltas.add(name, tensor)
            if name.endswith(("k_proj.weight", "norm.weight")):  # the end of a bucket
                for rank, delta in zip(engine, deltas.take(), strict=True):
                    rank.load(delta)
                    assert update < 2 or all(piece.gap_bytes for piece in delta.pieces)
        found = {
            f"{name}@{i}": checksum([each]) for i, rank in enumerate(engine) for name, each in rank.parameters.items()
        }
        assert found == deltas.result()
        for number, tensor in enumerate(weights.values()):
            tensor.view(-1)[update + number :: 20] += 1
