"""Samples: inverse operations, and compact pickling."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.datasets.batch import Batch


def make(samples: int, width: int, seed: int = 0, **meta: object) -> Batch:
    """Samples with every dtype the pipelines use."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (samples, width), generator=generator)
    lengths = torch.randint(1, width + 1, (samples, 1), generator=generator)
    mask = (torch.arange(width)[None] < lengths).long()
    return Batch(
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


def same(one: Batch, two: Batch) -> None:
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
@given(st.integers(0, 9).flatmap(lambda n: st.permutations(range(n))), st.integers(0, 9), widths)
def test_join_restores_what_select_idxs_took_apart(order: list[int], cut: int, width: int) -> None:
    data = make(len(order), width)
    moved = data.select_idxs(order)
    assert moved.non_tensor_batch["id"].tolist() == [data.non_tensor_batch["id"][index] for index in order]
    rest = range(min(cut, len(order))), range(min(cut, len(order)), len(order))
    joined = Batch.join([moved.select_idxs(part) for part in rest], np.argsort(order).tolist())
    same(joined, Batch(data.tensors(), data.non_tensor_batch))


@settings(max_examples=30, deadline=None)
@given(sizes, widths)
def test_pickling_returns_the_same_data(samples: int, width: int) -> None:
    data = make(samples, width, step=4)
    same(pickle.loads(pickle.dumps(data, protocol=5)), data)


def test_a_view_is_pickled_without_the_rest_of_its_tensor() -> None:
    data = Batch({"input_ids": torch.zeros(1000, 1000)[:10]})
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


def test_adding_and_leaving_out_change_neither_the_batch_nor_its_columns() -> None:
    data = make(2, 3, step=4)
    more = data.adding({"values": torch.zeros(2, 3)})
    assert "values" not in data and more.batch["input_ids"] is data.batch["input_ids"]
    same(more.without("values"), data)


def test_a_missing_key_error_lists_the_existing_keys() -> None:
    with pytest.raises(KeyError, match="attention_mask"):
        make(1, 1).select("advantages")


def test_entries_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="number of samples"):
        Batch({"a": torch.zeros(2), "b": torch.zeros(3)})
