"""Which requests of a batch are computed once because they have the same tokens."""

from __future__ import annotations

import pytest
import torch

from roll.platforms.cpu.sglang_model import first_with_same_tokens, tokens_once


@pytest.mark.parametrize(
    ("ids", "lengths", "prefixes", "first"),
    [
        ([1, 2, 1, 2, 1, 2, 3], [2, 2, 3], [0, 0, 0], [0, 0, 2]),
        ([5, 5, 5, 5], [1, 1, 2], [0, 0, 0], [0, 0, 2]),
        ([1, 2, 1, 2], [2, 2], [0, 3], [0, 1]),  # the second one continues other tokens
        ([1, 2, 1, 2, 1, 2], [2, 2, 2], [3, 0, 0], [0, 1, 1]),
        ([7], [0, 1, 0], [0, 0, 0], [0, 1, 2]),
        ([], [], [], []),
    ],
)
def test_requests_with_the_same_tokens_and_no_prefix_share_the_first(ids, lengths, prefixes, first):
    assert first_with_same_tokens(torch.tensor(ids, dtype=torch.int64), lengths, prefixes) == first


@pytest.mark.parametrize("seed", range(20))
def test_each_token_finds_itself_among_those_that_are_computed(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 4, (9,), generator=generator).tolist()
    prompts = [torch.randint(0, 3, (size,), generator=generator) for size in [2, *sizes]]
    prompts += [prompts[0], prompts[4]]
    ids, lengths = torch.cat(prompts), [len(prompt) for prompt in prompts]
    first = first_with_same_tokens(ids, lengths, [0] * 12)
    assert len(set(first)) < 12
    computed, source = tokens_once(first, torch.tensor(lengths))
    assert torch.equal(ids[computed][source], ids)
    assert len(computed) == sum(lengths[index] for index in set(first))
    requests = torch.arange(12).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(requests[computed][source], torch.tensor(first)[requests])
