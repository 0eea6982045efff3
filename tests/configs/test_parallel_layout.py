"""Device mappings of the YAML, and the split of ranks into parallel dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.devices.parallel_layout import ParallelLayout, RankCoordinates, parse_device_mapping, spans
from tests.configs.samples import rlvr

RANKS = st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True)
SIZES = st.integers(1, 6)


@given(RANKS)
def test_spans_round_trip(ranks: list[int]) -> None:
    assert parse_device_mapping(spans(ranks)) == ranks


def test_spans_join_consecutive_ranks() -> None:
    assert (spans([0, 1, 2, 3, 6]), spans([6, 0, 1])) == ("0-3,6", "6,0-1")


@given(RANKS)
def test_lists_round_trip(ranks: list[int]) -> None:
    assert parse_device_mapping(ranks) == ranks
    assert parse_device_mapping(str(ranks)) == ranks


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 4))
def test_range_expressions_match_python(start: int, count: int, step: int) -> None:
    stop = start + count * step
    assert parse_device_mapping(f"list(range({start},{stop},{step}))") == list(range(start, stop, step))
    text = f"list(range({start},{start + count})) + [{start + count + 5}]"
    assert parse_device_mapping(text) == [*range(start, start + count), start + count + 5]


@settings(max_examples=40, deadline=None)
@given(st.text("0123456789-,[]()+ listrange", max_size=12))
def test_other_expressions_are_refused_and_never_evaluated(text: str) -> None:
    try:
        ranks = parse_device_mapping(text)
    except ValueError:
        return
    assert all(type(rank) is int and rank >= 0 for rank in ranks)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0-", "'0-' is not a list of ranks"),
        ("5-2", "'5-2' is empty"),
        ("\u0663", "is not a list of ranks"),
        ("0-\u0667", "is not a list of ranks"),
        ([0, "1"], "is not a list of whole numbers"),
        ([True], "is not a list of whole numbers"),
        ({0: 1}, "is not a list of ranks"),
        ("[0, 0]", "contains device 0 twice"),
        ("0-99999999", "are more than"),
        ("list(range(0,10**9))", "is not a list of ranks"),
        ("list(range(0,1000000000))", "are more than"),
        ("[-1]", "is not a list of ranks"),
        ("open('x')", "is not a list of ranks"),
        ("+".join(["[0]"] * 5000), "has too many parts; write spans, such as '0-7,16-23'"),
        ("[i for i in range(3)]", "is not a list of ranks"),
    ],
)
def test_invalid_device_mapping_is_explained(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", "\\[").replace("(", "\\(")):
        parse_device_mapping(value)


def test_null_means_no_devices() -> None:
    assert parse_device_mapping(None) == []


@given(SIZES, SIZES, SIZES, SIZES)
def test_every_rank_has_its_own_coordinates(tensor: int, data: int, pipeline: int, context: int) -> None:
    layout = ParallelLayout(tensor, data, pipeline, context)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    ranks = [layout.rank(at.tensor, at.data, at.pipeline, at.context) for at in places]
    assert ranks == list(range(layout.world_size))


def test_context_is_between_tensor_and_data() -> None:
    layout = ParallelLayout(tensor=2, data=2, context=2)
    assert layout.coordinates(2) == RankCoordinates(tensor=0, context=1, data=0, pipeline=0)
    assert layout.coordinates(4) == RankCoordinates(tensor=0, context=0, data=1, pipeline=0)
    assert [layout.padded(length) for length in (1, 4, 5)] == [4, 4, 8] and layout.round_to == 8


def test_tensor_is_fastest_then_data_then_pipeline() -> None:
    layout = ParallelLayout(tensor=2, data=2, pipeline=2)
    assert layout.coordinates(1) == RankCoordinates(tensor=1, data=0, pipeline=0)
    assert layout.coordinates(2) == RankCoordinates(tensor=0, data=1, pipeline=0)
    assert layout.coordinates(4) == RankCoordinates(tensor=0, data=0, pipeline=1)


def test_layouts_follow_from_devices_and_sizes(tmp_path: Path) -> None:
    config = rlvr(tmp_path, "actor_infer.num_gpus_per_worker=2")
    assert config.actor_train.layout == ParallelLayout(tensor=2, data=8, pipeline=1)
    assert config.actor_infer.layout == ParallelLayout(tensor=2, data=4, pipeline=1)


def test_unused_reference_owns_no_devices(tmp_path: Path) -> None:
    assert set(rlvr(tmp_path, "reference.device_mapping=0-15").device_roles()) == {"actor_train", "actor_infer"}
    used = rlvr(tmp_path, "reference.device_mapping=0-15", "use_kl_loss=true", "kl_loss_coef=0.01")
    assert set(used.device_roles()) == {"actor_train", "actor_infer", "reference"}
