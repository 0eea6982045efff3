"""Collates token lists into right-padded tensors [B, T], with the keys of a training batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from roll.datasets.sft import SFTExample

NO_VERSION = -1
"""`weight_version` of a token that the policy did not sample."""

SAMPLING_MASK, SAMPLING_MASK_SIZES = "sampling_mask", "sampling_mask_sizes"
"""Names of the tensors of `sampling_masks`."""

Sample = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""(prompt ids, response ids, log-prob of each response token, weight version of each response token).

A response token with NO_VERSION, such as one of an observation between two turns, is not trained on."""


def collate_samples(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Collates generated samples, at least one; T is the length of the longest.

    Returns:
        Tensors [B, T]: `input_ids`, `attention_mask`, `position_ids` int64; `response_mask` bool, true for sampled
        tokens; `behavior_log_probs` float32, 0 for tokens that were not sampled; `weight_version` int32, -1 for those.

    Raises:
        ValueError: there is no sample, or the lists of a sample differ in length.
    """
    for number, (_, response, log_probs, versions) in enumerate(samples):
        if not len(response) == len(log_probs) == len(versions):
            raise ValueError(
                f"sample {number}: {len(response)} response tokens, {len(log_probs)} log-probs and "
                f"{len(versions)} versions; the numbers must be equal"
            )
    tensors = _collate_tokens([(prompt, response) for prompt, response, _, _ in samples])
    mask = tensors["response_mask"]
    tensors["behavior_log_probs"] = torch.zeros(mask.shape, dtype=torch.float32)
    tensors["weight_version"] = torch.full(mask.shape, NO_VERSION, dtype=torch.int32)
    # One assignment for all rows: a masked tensor is filled row by row, in the order of the samples.
    all_log_probs = list(chain.from_iterable(log_probs for _, _, log_probs, _ in samples))
    all_versions = list(chain.from_iterable(versions for _, _, _, versions in samples))
    tensors["behavior_log_probs"][mask] = torch.tensor(all_log_probs, dtype=torch.float32)
    tensors["weight_version"][mask] = torch.tensor(all_versions, dtype=torch.int32)
    tensors["response_mask"] &= tensors["weight_version"] != NO_VERSION
    return tensors


def sampling_masks(masks: Sequence[Sequence[Sequence[int]]], width: int) -> dict[str, Tensor]:
    """The token ids that each token was sampled from, where `top_k` and `top_p` truncated them.

    Args:
        masks: [B] rows of lists, from the first column on; a row may be shorter than `width`, or empty.
        width: T.

    Returns:
        `sampling_mask_sizes` [B, T] int32, the number of ids of each token, and `sampling_mask` [B, M] int32, the ids
        of all tokens of a row one after the other, filled with -1; a token with no ids was sampled from all. M is not
        T, so that nothing takes it for columns. An empty dictionary where no token has ids.
    """
    if not any(map(any, masks)):
        return {}
    sizes = torch.zeros(len(masks), width, dtype=torch.int32)
    for row, of_row in enumerate(masks):
        sizes[row, : len(of_row)] = torch.tensor([len(kept) for kept in of_row], dtype=torch.int32)
    totals = sizes.sum(-1)
    longest = int(totals.max())
    ids = torch.full((len(masks), longest + (longest == width)), -1, dtype=torch.int32)
    flat = list(chain.from_iterable(chain.from_iterable(masks)))
    ids[torch.arange(ids.shape[1]) < totals[:, None]] = torch.tensor(flat, dtype=torch.int32)
    return {SAMPLING_MASK: ids, SAMPLING_MASK_SIZES: sizes}


def collate_examples(examples: Sequence[SFTExample]) -> dict[str, Tensor]:
    """Collates SFT examples: the first four tensors of `collate_samples`; `response_mask` marks learned tokens."""
    tensors = _collate_tokens([(example.prompt_ids, example.response_ids) for example in examples])
    for row, example in enumerate(examples):
        if example.loss_mask is not None:
            start = len(example.prompt_ids)
            tensors["response_mask"][row, start : start + len(example.loss_mask)] &= torch.tensor(example.loss_mask)
    return tensors


def collate_scored(sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Collates sequences [B] whose value at the end is wanted: that of a reward model.

    A model with a value head gives the value before a token. So a token of padding follows each sequence, and
    `response_mask` is true there alone: row i has its value in column len(sequences[i]).

    Returns:
        The first four tensors of `collate_samples` [B, T], T being one more than the longest sequence.
    """
    return _collate_tokens([(sequence, [0]) for sequence in sequences])


def _collate_tokens(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
    if not pairs:
        raise ValueError("cannot collate an empty batch: there are no samples")
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    positions = torch.arange(width)
    starts = torch.tensor([len(prompt) for prompt, _ in pairs])[:, None]
    ends = torch.tensor([len(prompt) + len(response) for prompt, response in pairs])[:, None]
    attended = positions < ends
    input_ids = torch.zeros(attended.shape, dtype=torch.int64)
    tokens = list(chain.from_iterable(chain.from_iterable(pairs)))
    input_ids[attended] = torch.tensor(tokens, dtype=torch.int64)
    return {
        "input_ids": input_ids,
        "attention_mask": attended.long(),
        "position_ids": positions * attended,
        "response_mask": attended & (positions >= starts),
    }
