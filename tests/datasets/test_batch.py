"""DataProto: inverse operations, padding, and compact pickling."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.datasets.batch import DataProto


def make(samples: int, width: int, seed: int = 0, **meta: object) -> DataProto:
    """Samples with every dtype the pipelines use."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (samples, width), generator=generator)
    lengths = torch.randint(1, width + 1, (samples, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths).long()
    return DataProto.from_dict(
        {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "response_mask": mask.bool(),
            "behavior_log_probs": -torch.rand(samples, width, generator=generator) * mask,
            "weight_version": torch.where(mask.bool(), 3, -1).int(),
            "scores": torch.rand(samples, generator=generator).bfloat16(),
        },
        {"id": [f"{seed}-{index}" for index in range(samples)], "lists": [[1, index] for index in range(samples)]},
        dict(meta),
    )


def same(one: DataProto, two: DataProto) -> None:
    assert set(one.batch.keys()) == set(two.batch.keys())
    for key, value in one.batch.items():
        assert value.dtype == two.batch[key].dtype and torch.equal(value, two.batch[key]), key
    assert {k: v.tolist() for k, v in one.non_tensor_batch.items()} == {
        k: v.tolist() for k, v in two.non_tensor_batch.items()
    }
    assert one.meta_info == two.meta_info


sizes = st.integers(0, 9)
widths = st.integers(1, 6)


@settings(max_examples=40, deadline=None)
@given(sizes, widths, st.integers(0, 9))
def test_concat_joins_what_select_idxs_took_apart(samples: int, width: int, cut: int) -> None:
    data = make(samples, width)
    pieces = [data.select_idxs(range(min(cut, samples))), data.select_idxs(range(min(cut, samples), samples))]
    same(DataProto.concat(pieces), data)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))), widths)
def test_reorder_by_the_inverse_permutation_restores_the_order(order: list[int], width: int) -> None:
    data = make(len(order), width)
    moved = data.reorder(order)
    assert moved.non_tensor_batch["id"].tolist() == [data.non_tensor_batch["id"][index] for index in order]
    same(moved.reorder(np.argsort(order)), data)


@settings(max_examples=30, deadline=None)
@given(sizes, widths)
def test_pickling_returns_the_same_data(samples: int, width: int) -> None:
    data = make(samples, width, step=4)
    same(pickle.loads(pickle.dumps(data, protocol=5)), data)


def test_a_view_is_pickled_without_the_rest_of_its_tensor() -> None:
    data = DataProto.from_dict({"input_ids": torch.zeros(1000, 1000)[:10]})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 10 * 1000 * 4


def test_unpickled_tensors_are_writable() -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(make(2, 3), protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    data = pickle.loads(head, buffers=frozen)
    data.batch["input_ids"].add_(1)


def test_concat_pads_narrow_parts_on_the_right() -> None:
    data = DataProto.concat([make(1, 2), make(1, 4, seed=1)])
    assert data.batch["input_ids"].shape == (2, 4)
    assert data.batch["input_ids"][0, 2:].tolist() == [0, 0]
    assert data.batch["weight_version"][0, 2:].tolist() == [-1, -1]


def test_concat_gives_padding_neither_turn_nor_state() -> None:
    parts = [DataProto.from_dict({"turn_index": torch.zeros(1, n), "state_ids": torch.zeros(1, n)}) for n in (1, 2)]
    data = DataProto.concat(parts)
    assert data.batch["turn_index"][0].tolist() == data.batch["state_ids"][0].tolist() == [0, -1]


def test_concat_refuses_parts_with_other_keys() -> None:
    with pytest.raises(ValueError, match="different keys"):
        DataProto.concat([make(1, 2), make(1, 2).select("input_ids")])


def test_a_missing_key_error_lists_the_existing_keys() -> None:
    with pytest.raises(KeyError, match="attention_mask"):
        make(1, 1).select("advantages")


def test_entries_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="number of samples"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_reorder_refuses_what_is_not_a_permutation() -> None:
    with pytest.raises(ValueError, match="permutation"):
        make(3, 2).reorder([0, 0, 1])
