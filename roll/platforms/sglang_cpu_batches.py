"""How requests of different lengths are grouped so that one padded attention call serves many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_FACTOR = 2.0
"""Longest over shortest key length in one group: at most half of a gathered key cache is padding."""

FREE_PADDING = 64
"""Keys of padding that cost less than one more attention call."""

MASK_ELEMENTS = 1 << 24
"""Largest mask of one call: 64 MiB once the kernel holds it as float32."""


@dataclass(frozen=True)
class AttentionBatch:
    """Requests that share one padded attention call; b requests, q queries and k keys of the longest of them.

    Attributes:
        requests: [b] indices of the requests in the batch.
        tokens: [b, q] rows of the flattened query tensor; padding repeats the request's last row.
        filled: [b, q] true where `tokens` is not padding.
        slots: [b, k] rows of the key and value cache; padding reads slot 0.
        mask: [b, q, k] true where the query may see the key.
    """

    requests: list[int]
    tokens: torch.Tensor
    filled: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def group_by_length(
    queries: Sequence[int], keys: Sequence[int], heads_per_key: int = 1, mask_elements: int = MASK_ELEMENTS
) -> list[list[int]]:
    """Indices of requests by group: every request once, longest keys first.

    A group is closed when the next request would be padded beyond `PADDING_FACTOR`, or when the padded mask
    (requests * longest query * heads per key * longest key) would exceed `mask_elements`. A request that exceeds it
    alone is a group of its own.
    """
    groups: list[list[int]] = []
    longest_key, longest_query = 0, 0
    for index in sorted(range(len(keys)), key=lambda i: (-keys[i], i)):
        query = max(longest_query, queries[index])
        fits = groups and PADDING_FACTOR * keys[index] + FREE_PADDING >= longest_key
        if fits and (len(groups[-1]) + 1) * query * heads_per_key * longest_key <= mask_elements:
            groups[-1].append(index)
            longest_query = query
        else:
            groups.append([index])
            longest_key, longest_query = keys[index], queries[index]
    return [sorted(group) for group in groups]


def build_batch(
    requests: list[int],
    starts: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    slot_table: torch.Tensor,
    rows: torch.Tensor,
) -> AttentionBatch:
    """Index tensors and causal mask of one group.

    Args:
        requests: indices of the group's requests.
        starts: [B] first row of each request in the flattened query tensor.
        queries: [B] new tokens of each request; they are the last ones of its keys.
        keys: [B] keys of each request, cached prefix included.
        slot_table: [pool, context] cache slot of each position of each pool row.
        rows: [B] pool row of each request.
    """
    index = torch.tensor(requests)
    start, query, key = starts[index, None], queries[index, None], keys[index, None]
    steps = torch.arange(int(query.max()))[None]
    positions = torch.arange(int(key.max()))[None]
    exists = positions < key
    slots = slot_table[rows[index], : positions.shape[1]].long().masked_fill_(~exists, 0)
    visible_until = (key - query + steps).clamp(max=key - 1)
    return AttentionBatch(
        requests=requests,
        tokens=start + torch.minimum(steps, query - 1),
        filled=steps < query,
        slots=slots,
        mask=positions[:, None] <= visible_until[..., None],
    )
