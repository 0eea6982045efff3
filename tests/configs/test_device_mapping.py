from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.parallel_layout import parse_device_mapping, spans

RANKS = st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True)


@given(RANKS)
def test_spans_are_read_back(ranks: list[int]) -> None:
    assert parse_device_mapping(spans(ranks)) == ranks


def test_spans_join_consecutive_ranks() -> None:
    assert (spans([0, 1, 2, 3, 6]), spans([6, 0, 1])) == ("0-3,6", "6,0-1")


@given(RANKS)
def test_lists_are_read_back_as_values_and_as_text(ranks: list[int]) -> None:
    assert parse_device_mapping(ranks) == ranks
    assert parse_device_mapping(str(ranks)) == ranks


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 4))
def test_range_expressions_are_what_python_makes_of_them(start: int, count: int, step: int) -> None:
    stop = start + count * step
    assert parse_device_mapping(f"list(range({start},{stop},{step}))") == list(range(start, stop, step))
    text = f"list(range({start},{start + count})) + [{start + count + 5}]"
    assert parse_device_mapping(text) == [*range(start, start + count), start + count + 5]


@settings(max_examples=40, deadline=None)
@given(st.text("0123456789-,[]()+ listrange", max_size=12))
def test_any_other_text_is_refused_and_never_run(text: str) -> None:
    try:
        ranks = parse_device_mapping(text)
    except ValueError:
        return
    assert all(type(rank) is int and rank >= 0 for rank in ranks)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("0-", "'0-' is not a list of ranks"),
        ("5-2", "'5-2' is empty"),
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
def test_what_is_no_mapping_is_explained(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("[", "\\[").replace("(", "\\(")):
        parse_device_mapping(value)


def test_nothing_is_no_device() -> None:
    assert parse_device_mapping(None) == []
