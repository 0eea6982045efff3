import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from roll.datasets.collate import sampling_masks
from roll.distributed.train.micro_batch import make_micro_batch

IDS = torch.tensor([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 0, 0], [0, 0, 0, 8, 9, 10]])
MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]])


def batch(**more):
    return TensorDict({"input_ids": IDS, "attention_mask": MASK, "scores": torch.tensor([1.0, 2.0, 3.0]), **more}, [3])


def test_columns_after_the_longest_sample_are_cut():
    micro = make_micro_batch(batch(), [0, 1])
    assert micro.input_ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert micro.batch["attention_mask"].shape == (2, 4) and micro.batch["scores"].tolist() == [1.0, 2.0]


def test_every_token_but_a_samples_first_is_scored():
    micro = make_micro_batch(batch(), [0, 1])
    assert micro.targets.tolist() == [2, 3, 5, 6, 7]
    assert micro.to_columns(torch.arange(1.0, 6.0)).tolist() == [[0, 1, 2, 0], [0, 3, 4, 5]]


def test_hidden_rows_point_at_the_token_before():
    micro = make_micro_batch(batch(), [1, 2])
    flat = micro.input_ids.t().flatten()
    assert flat[micro.hidden_rows].tolist() == [4, 5, 6, 8, 9]
    assert micro.targets.tolist() == [5, 6, 7, 9, 10]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_each_scored_token_has_the_ids_of_its_sampling_mask(packed, rows):
    masks = [[[], [2, 3, 4], [3]], [], [[], [], [], [], [9], [10, 1]]]
    micro = make_micro_batch(batch(**sampling_masks(masks, 6)), rows, packed=packed)
    assert micro.kept.shape[0] == len(micro.targets) and "sampling_mask" not in micro.batch.keys()
    found = [[token for token in kept if token >= 0] for kept in micro.kept.tolist()]
    expected = {0: [[2, 3, 4], [3]], 1: [[], [], []], 2: [[9], [10, 1]]}
    assert found == [kept for row in rows for kept in expected[row]]
    assert make_micro_batch(batch(), rows).kept is None


@pytest.mark.parametrize("packed", [True, False])
def test_each_scored_token_has_the_tokens_of_the_teacher_at_its_position(packed):
    ids = torch.arange(36).view(3, 6, 2)
    micro = make_micro_batch(batch(teacher_top_ids=ids), [0, 2], packed=packed)
    assert micro.chosen.tolist() == ids[[0, 0, 2, 2], [1, 2, 4, 5]].tolist()
    assert make_micro_batch(batch(), [0]).chosen is None
    narrow = make_micro_batch(batch(teacher_top_ids=ids), [0, 1], packed=packed)
    assert torch.equal(narrow.batch["teacher_top_ids"], ids[:2, :4])
    columns = narrow.to_columns(narrow.chosen)
    assert torch.equal(columns[0, 1:3], ids[0, 1:3]) and columns.shape == (2, 4, 2)


def test_left_padding_is_moved_to_the_right_and_scores_go_back_to_their_columns():
    micro = make_micro_batch(batch(), [2])
    assert micro.input_ids.tolist() == [[8, 9, 10]]
    assert micro.to_columns(torch.tensor([1.0, 2.0])).tolist() == [[0, 0, 0, 0, 1, 2]]


def test_only_the_response_is_scored_where_the_batch_has_a_response_mask():
    response = torch.zeros_like(MASK, dtype=torch.bool)
    response[1, 2:4] = True
    micro = make_micro_batch(batch(response_mask=response), [0, 1])
    assert micro.targets.tolist() == [6, 7]


def test_width_is_rounded_up_for_sequence_parallel():
    assert make_micro_batch(batch(), [0, 1], multiple=8).input_ids.shape == (2, 8)


@pytest.mark.parametrize("row", [[0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]])
def test_empty_samples_and_inner_padding_are_refused_by_index(row):
    torn = batch()
    torn["attention_mask"] = torch.cat([MASK[:2], torch.tensor([row])])
    with pytest.raises(ValueError, match="sample 2 is empty or has padding between its tokens"):
        make_micro_batch(torn, [0, 2])


def test_turn_indices_are_cut_and_moved_with_their_tokens():
    turns = torch.tensor([[-1, 0, 1, -1, -1, -1], [-1, 0, -1, 1, -1, -1], [-1, -1, -1, -1, 0, 0]])
    micro = make_micro_batch(batch(turn_index=turns), [1, 0])
    assert micro.batch["turn_index"].tolist() == [[-1, 0, -1, 1], [-1, 0, 1, -1]]


def test_packed_samples_follow_each_other_without_padding():
    micro, padded = (make_micro_batch(batch(), [1, 2, 0], packed=packed) for packed in (True, False))
    assert micro.input_ids.tolist() == [[4, 5, 6, 7, 8, 9, 10, 1, 2, 3]]
    assert micro.bounds is not None and micro.bounds.tolist() == [0, 4, 7, 10] and micro.lengths == [4, 3, 3]
    assert micro.positions is not None and micro.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert micro.input_ids[0, micro.hidden_rows].tolist() == [4, 5, 6, 8, 9, 1, 2]
    assert micro.targets.tolist() == padded.targets.tolist() == [5, 6, 7, 9, 10, 2, 3]
    values = torch.arange(7.0)
    assert torch.equal(micro.to_columns(values), padded.to_columns(values))


def test_a_packed_micro_batch_is_padded_at_its_end_for_sequence_parallel():
    micro = make_micro_batch(batch(), [0, 2], multiple=4, packed=True)
    assert micro.input_ids.tolist() == [[1, 2, 3, 8, 9, 10, 0, 0]]
    assert micro.bounds is not None and micro.bounds.tolist() == [0, 3, 8] and micro.lengths == [3, 5]


def prompts_of_groups(*rows):
    """Samples of these ids, on the left of 0."""
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return TensorDict({"input_ids": ids, "attention_mask": mask}, [len(rows)])


def test_tokens_that_samples_share_at_their_beginning_are_computed_once():
    samples = prompts_of_groups([7, 8, 1, 2], [7, 8, 3], [5, 8, 1], [7, 8], [7, 8, 3])
    micro = make_micro_batch(samples, range(5), packed=True, shared=True)
    assert micro.input_ids.tolist() == [[5, 8, 1, 7, 8, 1, 2, 3]]
    assert micro.positions is not None and micro.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 2]
    assert micro.hidden_rows.tolist() == [3, 4, 5, 3, 4, 0, 1, 3, 3, 4]
    assert micro.targets.tolist() == [8, 1, 2, 8, 3, 8, 1, 8, 8, 3]


def test_attention_is_given_whole_samples_the_longest_first_and_no_prefix_of_another():
    samples = prompts_of_groups([7, 8, 1, 2], [7, 8, 3], [5, 8, 1], [7, 8], [7, 8, 3])
    micro = make_micro_batch(samples, range(5), packed=True, shared=True)
    assert micro.expand is not None and micro.collapse is not None and micro.bounds is not None
    assert micro.input_ids[0, micro.expand].tolist() == [7, 8, 1, 2, 5, 8, 1, 7, 8, 3]
    assert micro.lengths == [4, 3, 3] and micro.bounds.tolist() == [0, 4, 7, 10]
    assert micro.expand[micro.collapse].tolist() == list(range(8))
    assert micro.collapse.tolist() == [4, 5, 6, 0, 1, 2, 3, 9]


@pytest.mark.parametrize("seed", range(20))
def test_every_hidden_state_has_seen_the_tokens_before_its_target(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (12, 7), generator=generator)  # three ids, so that many samples share some tokens
    first, length = torch.randint(0, 3, (12, 1), generator=generator), torch.randint(1, 5, (12, 1), generator=generator)
    columns = torch.arange(7)
    mask = ((columns >= first) & (columns < first + length)).long()
    samples = TensorDict({"input_ids": ids, "attention_mask": mask}, [12])
    micro = make_micro_batch(samples, range(12), multiple=4, packed=True, shared=True)
    assert micro.expand is not None and micro.collapse is not None and micro.bounds is not None
    assert micro.positions is not None and micro.input_ids.shape[1] % 4 == 0
    assert micro.bounds.diff().tolist() == list(micro.lengths) and micro.bounds[-1] == len(micro.expand)
    for row, sample, column in zip(micro.hidden_rows, micro.samples, micro.columns, strict=True):
        place = int(micro.collapse[row])
        start = int(micro.bounds[micro.bounds <= place].max())
        seen = micro.input_ids[0, micro.expand[start : place + 1]].tolist()
        assert seen == ids[sample, int(first[sample]) : column].tolist()
        assert micro.positions[micro.expand[start : place + 1]].tolist() == list(range(place + 1 - start))


@pytest.mark.parametrize("rows", [[0, 1], [2]])
def test_samples_with_little_in_common_are_packed_as_they_are(rows):
    micro, plain = (make_micro_batch(batch(), rows, packed=True, shared=shared) for shared in (True, False))
    assert micro.expand is None and micro.collapse is None
    assert torch.equal(micro.input_ids, plain.input_ids) and micro.lengths == plain.lengths


def test_the_tree_of_shared_prefixes_is_padded_without_attention():
    samples = prompts_of_groups([7, 8, 1], [7, 8, 3])
    micro = make_micro_batch(samples, [0, 1], multiple=8, packed=True, shared=True)
    assert micro.input_ids.tolist() == [[7, 8, 1, 3, 0, 0, 0, 0]] and micro.lengths == [3, 3]
    assert micro.collapse is not None and micro.collapse.tolist() == [0, 1, 2, 5, 0, 0, 0, 0]


def samples_of(lengths, seed=0):
    """Samples with distinct tokens, padded on the right."""
    width, total = max(lengths), sum(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.randperm(total, generator=torch.Generator().manual_seed(seed)) + 1
    return TensorDict({"input_ids": ids, "attention_mask": mask.long()}, [len(lengths)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 4), st.sampled_from([1, 2]), st.booleans())
def test_context_ranks_share_the_tokens_of_every_sample_and_score_each_once(lengths, ranks, multiple, packed):
    """Each rank has two chunks of each sample, the first with the last, and never looks for a target in its part."""
    given_batch = samples_of(lengths)
    ids = given_batch["input_ids"]
    parts = [
        make_micro_batch(given_batch, range(len(lengths)), multiple, packed=packed, context=(rank, ranks))
        for rank in range(ranks)
    ]
    assert {part.input_ids.shape for part in parts} == {parts[0].input_ids.shape}
    assert parts[0].input_ids.shape[1] % multiple == 0
    whole = torch.cat([part.input_ids[0] for part in parts])[parts[0].whole]
    positions = torch.cat([part.positions for part in parts])[parts[0].whole]
    samples = zip(whole.split(parts[0].lengths), positions.split(parts[0].lengths), strict=True)
    for row, (tokens, places) in enumerate(samples):
        assert places.tolist() == list(range(len(places))) and len(places) % (2 * ranks) == 0
        assert torch.equal(tokens[: lengths[row]], ids[row, : lengths[row]])
    scored = [place for part in parts for place in zip(part.samples.tolist(), part.columns.tolist(), strict=True)]
    assert sorted(scored) == [(row, column) for row, length in enumerate(lengths) for column in range(1, length)]
    for rank, part in enumerate(parts):
        assert torch.equal(part.targets, ids[part.samples, part.columns])
        assert torch.equal(part.input_ids[0, part.hidden_rows], ids[part.samples, part.columns - 1])
        sizes = torch.tensor([length // (2 * ranks) for length in part.lengths])
        chunks = part.positions // sizes.repeat_interleave(2 * sizes)
        assert {*chunks.tolist()} == {rank, 2 * ranks - 1 - rank}
        assert torch.equal(parts[0].whole[parts[0].split], torch.arange(len(whole)))


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=7), min_size=1, max_size=5),
    layout=st.sampled_from([(False, False), (True, False), (True, True)]),
    multiple=st.sampled_from([1, 4]),
    same=st.booleans(),
)
def test_each_token_has_the_experts_of_its_sample_and_tokens_are_shared_only_with_the_same_ones(
    samples, layout, multiple, same
):
    """Experts of a token name its sample and position, or with `same` the tokens up to it."""
    width = max(map(len, samples))
    ids = torch.tensor([[*sample, *[0] * (width - len(sample))] for sample in samples])
    tensors = TensorDict({"input_ids": ids, "attention_mask": (ids > 0).long()}, [len(samples)])

    def experts(number, position):
        value = hash(tuple(samples[number][: position + 1])) if same else 100 * number + position
        return [[value % 251 + layer + k for k in range(2)] for layer in range(3)]

    routing = [
        np.array([experts(n, t) for t in range(len(sample) - 1)], np.int16).reshape(-1, 3, 2)
        for n, sample in enumerate(samples)
    ]
    packed, shared = layout
    micro = make_micro_batch(tensors, range(len(samples)), multiple, packed=packed, shared=shared, routing=routing)
    assert micro.routing.shape == (micro.input_ids.numel(), 3, 2)
    rows = micro.hidden_rows.tolist()
    for row, number, column in zip(rows, micro.samples.tolist(), micro.columns.tolist(), strict=True):
        assert micro.routed[row] and micro.routing[row].tolist() == experts(number, column - 1)
    assert (micro.routing[~micro.routed] == torch.arange(2, dtype=torch.int16)).all()
