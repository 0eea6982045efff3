"""Seeded sampling that depends only on the seed and the position."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from roll.platforms.cpu.sglang_sampling import ALL_TOKENS, plain_rows, sample_with_seeds, uniform

DRAWS = 200_000


def test_uniform_is_splitmix64():
    # Second output of SplitMix64 seeded with 0 is 0x6E789E6AA1B965F4: mixing 0, then adding nothing, is not it, so
    # the definition is checked on its first output, 0xE220A8397B1DCDAF, mixed once more.
    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    assert mix(0) == 0xE220A8397B1DCDAF
    for seed, position in [(0, 0), (1, 5), (2**31 - 1, 4095), (-3, 7)]:
        expected = (mix((mix(seed % 2**64) + position) % 2**64) >> 11) + 0.5
        assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected * 2.0**-53


def test_samples_follow_the_distribution():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    rows = torch.log(probabilities).expand(DRAWS, 4)
    drawn = sample_with_seeds(rows, torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)).squeeze(1)
    counts = torch.bincount(drawn, minlength=4) / DRAWS
    assert counts[1] == 0
    assert torch.allclose(counts, probabilities, atol=0.005)  # four standard deviations


def test_positions_of_one_seed_are_independent():
    rows = torch.zeros(DRAWS, 2)
    drawn = sample_with_seeds(rows, torch.full((DRAWS,), 7), torch.arange(DRAWS)).squeeze(1).double()
    pairs = torch.stack([drawn[:-1], drawn[1:]])
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(torch.corrcoef(pairs)[0, 1]) < 0.01


def test_a_sample_does_not_depend_on_other_rows():
    rows = torch.log_softmax(torch.randn(16, 100, generator=torch.Generator().manual_seed(0)), -1)
    seeds, positions = torch.arange(16), torch.arange(16) + 3
    batched = sample_with_seeds(rows, seeds, positions)
    alone = [sample_with_seeds(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(16)]
    assert torch.equal(batched, torch.cat(alone))


def test_a_row_with_one_possible_token_always_samples_it():
    rows = torch.full((1000, 5), float("-inf"))
    rows[:, 4] = 0
    assert (sample_with_seeds(rows, torch.arange(1000), torch.zeros(1000, dtype=torch.int64)) == 4).all()


def batch_info(top_ks=(ALL_TOKENS,) * 4, top_ps=(1.0,) * 4, min_ps=(0.0,) * 4, masks=None, seeds=(1, 2, 3, 4)):
    return SimpleNamespace(
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        need_top_k_sampling=set(top_ks) != {ALL_TOKENS},
        need_top_p_sampling=set(top_ps) != {1.0},
        need_min_p_sampling=set(min_ps) != {0.0},
        is_all_greedy=set(top_ks) == {1},
        sampling_mask_batch_indices=None if masks is None else torch.tensor(masks),
        sampling_seed=None if seeds is None else torch.tensor(seeds),
    )


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_ks": (ALL_TOKENS, 1, 40, ALL_TOKENS)}, [0, 3]),
        ({"top_ps": (0.9, 1.0, 1.0, 1.0), "min_ps": (0.0, 0.0, 0.1, 0.0)}, [1, 3]),
        ({"masks": [0, 2]}, [1, 3]),
        ({"top_ks": (1, 1, 1, 1)}, []),
        ({"seeds": None}, []),
    ],
)
def test_rows_that_ask_for_no_more_than_a_temperature(options, rows):
    assert plain_rows(batch_info(**options), 4) == rows
