from __future__ import annotations

import pytest
import torch

from roll.datasets.collate import collate_examples, collate_samples, collate_scored, sampling_masks
from roll.datasets.sft import SFTExample

SAMPLES = [([5, 6], [7, 8, 9], [-0.1, -0.2, -0.3], [3, 3, 4]), ([5], [7], [-0.5], [2])]


def test_the_value_of_a_sequence_is_asked_for_after_its_last_token():
    tensors = collate_scored([[5, 6, 7], [8]])
    assert tensors["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert tensors["response_mask"].tolist() == [[False, False, False, True], [False, True, False, False]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_samples_are_padded_on_the_right():
    batch = collate_samples(SAMPLES)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 7, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch["response_mask"].int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch["weight_version"].tolist() == [[-1, -1, 3, 3, 4], [-1, 2, -1, -1, -1]]
    expected = torch.tensor([[0, 0, -0.1, -0.2, -0.3], [0, -0.5, 0, 0, 0]])
    assert torch.equal(batch["behavior_log_probs"], expected)


def test_dtypes():
    kinds = {name: tensor.dtype for name, tensor in collate_samples(SAMPLES).items()}
    assert kinds == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "position_ids": torch.int64,
        "response_mask": torch.bool,
        "behavior_log_probs": torch.float32,
        "weight_version": torch.int32,
    }


def test_sampling_masks_follow_each_other_in_a_row():
    masks = sampling_masks([[[], [4, 5], [6]], [], [[7]]], width=4)
    assert masks["sampling_mask_sizes"].tolist() == [[0, 2, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert masks["sampling_mask"].tolist() == [[4, 5, 6], [-1, -1, -1], [7, -1, -1]]
    assert {tensor.dtype for tensor in masks.values()} == {torch.int32}
    assert sampling_masks([[], [[], []]], width=4) == {}
    assert sampling_masks([[[1, 2], [3, 4]]], width=4)["sampling_mask"].tolist() == [[1, 2, 3, 4, -1]]


def test_lists_of_different_length_are_an_error():
    with pytest.raises(ValueError, match="sample 0: 2 response tokens, 1 log-probs and 2 versions"):
        collate_samples([([1], [2, 3], [-0.1], [0, 0])])
    with pytest.raises(ValueError, match="no samples"):
        collate_samples([])


def test_the_response_mask_of_an_example_is_true_for_its_response():
    batch = collate_examples([SFTExample("a", [5, 6], [7, 1]), SFTExample("b", [5], [1])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [5, 1, 0, 0]]
    assert batch["response_mask"].int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert set(batch) == {"input_ids", "attention_mask", "position_ids", "response_mask"}
