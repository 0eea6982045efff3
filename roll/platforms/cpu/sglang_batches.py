"""Groups requests of similar length for one padded attention call each; torch only, without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_FACTOR = 2.0
"""Largest ratio of key lengths in a group, so that at most half of the gathered keys are padding."""

FREE_PADDING = 64
"""Padding in keys that is always allowed, because it costs less than another attention call."""

MASK_ELEMENTS = 1 << 24
"""Largest mask of one call: 64 MiB as float32 in the kernel."""


@dataclass(frozen=True)
class AttentionBatch:
    """Requests that share one padded attention call, as index tensors that all layers of a forward pass use.

    b requests, q queries and k keys of the longest of them, G query heads for each key head.

    Attributes:
        requests: [b] indices of the requests in the batch.
        queries: [b * q] rows of the flattened query tensor; padding repeats the request's last row.
        filled: [tokens] indices into `queries` that are not padding.
        targets: [tokens] their rows in the flattened output tensor.
        keys: [b * k] slots of the key and value cache; padding reads slot 0.
        bias: [b, 1, G * q, k] zero where the query attends to the key, -inf elsewhere.
    """

    requests: list[int]
    queries: torch.Tensor
    filled: torch.Tensor
    targets: torch.Tensor
    keys: torch.Tensor
    bias: torch.Tensor


def group_by_length(
    queries: Sequence[int], keys: Sequence[int], heads_per_key: int = 1, mask_elements: int = MASK_ELEMENTS
) -> list[list[int]]:
    """Request indices of each group; every request is in one group, and groups are ordered by decreasing key length.

    A new group begins when the next request would be padded beyond `PADDING_FACTOR`, or when the padded mask
    (requests * longest query * heads per key * longest key) would exceed `mask_elements`. A request whose own mask
    exceeds that forms its own group.
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
    slots: torch.Tensor,
    heads_per_key: int,
    dtype: torch.dtype,
) -> AttentionBatch:
    """Index tensors and causal mask of one group.

    Args:
        requests: indices of the group's requests.
        starts: [B] first row of each request in the flattened query tensor.
        queries: [B] number of new tokens of each request, which are the last of its keys.
        keys: [B] number of keys of each request, including the cached prefix.
        slots: [B, context] cache slot of each position of each request.
        heads_per_key: query heads that share a key head.
        dtype: of the queries.
    """
    index = torch.tensor(requests)
    start, query, key = starts[index, None], queries[index, None], keys[index, None]
    steps, positions = torch.arange(int(query.max()))[None], torch.arange(int(key.max()))[None]
    rows = start + torch.minimum(steps, query - 1)
    filled = (steps < query).view(-1).nonzero().view(-1)
    slot = slots[index, : positions.shape[1]].long().masked_fill_(positions >= key, 0)
    hidden = positions[:, None] > (key - query + steps).clamp(max=key - 1)[..., None]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return AttentionBatch(
        requests=requests,
        queries=rows.view(-1),
        filled=filled,
        targets=rows.view(-1)[filled],
        keys=slot.view(-1),
        bias=bias[:, None, None].expand(-1, -1, heads_per_key, -1, -1).flatten(2, 3),
    )
