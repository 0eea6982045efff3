"""Grouping of requests for one padded attention call."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.platforms.cpu.sglang_batches import FREE_PADDING, PADDING_FACTOR, build_batch, group_by_length

LENGTHS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3000)), min_size=1, max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_every_request_is_in_one_group_within_the_padding_and_mask_limits(lengths, heads_per_key):
    queries = [query for query, _ in lengths]
    keys = [query + prefix for query, prefix in lengths]
    groups = group_by_length(queries, keys, heads_per_key, mask_elements=20_000)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = max(keys[i] for i in group), min(keys[i] for i in group)
        assert longest <= PADDING_FACTOR * shortest + FREE_PADDING
        elements = len(group) * max(queries[i] for i in group) * heads_per_key * longest
        assert len(group) == 1 or elements <= 20_000


def test_equal_lengths_are_one_group_in_order():
    assert group_by_length([1, 1, 1], [7, 7, 7]) == [[0, 1, 2]]


def test_index_tensors_and_causal_mask_of_a_batch():
    slots = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]], dtype=torch.int32)
    queries, keys = torch.tensor([1, 2]), torch.tensor([4, 3])
    batch = build_batch([0, 1], torch.tensor([0, 1]), queries, keys, slots, 1, torch.float32)
    assert batch.queries.tolist() == [0, 0, 1, 2]
    assert batch.filled.tolist() == [0, 2, 3]
    assert batch.targets.tolist() == [0, 1, 2]
    assert batch.keys.view(2, 4).tolist() == [[10, 11, 12, 13], [20, 21, 22, 0]]
    visible = (batch.bias == 0).squeeze(1)
    assert visible[0].tolist() == [[True] * 4, [True] * 4]
    assert visible[1].tolist() == [[True, True, False, False], [True, True, True, False]]


def test_query_heads_of_one_key_head_have_the_same_mask():
    slots, one = torch.arange(6)[None], torch.tensor([1])
    batch = build_batch([0], torch.tensor([0]), one * 2, one * 6, slots, 3, torch.float32)
    assert batch.bias.shape == (1, 1, 6, 6)
    assert torch.equal(batch.bias[0, 0, :2], batch.bias[0, 0, 4:])
