"""A response ends with the token in which a stop string ends, however its text was divided into tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.datasets.stop_strings import divide_stops, text_until_stop, tokens_until_stop
from tests.pipeline.test_response_text import ANSWERED, WORDS, tokenizer

PIECES = ["a", "b", "ab", "ba", "</", "ans", "wer>", "</ans", ">", " "]
"""A vocabulary in which the same text has several spellings."""

STOPS = st.lists(st.text("ab<>/answer ", min_size=1, max_size=6), max_size=3)


def decode(ids: Any) -> str:
    return "".join(PIECES[each] for each in ids)


def first_end(ids: list[int], stops: list[str]) -> int | None:
    """Token by token, as an engine looks for it."""
    return next((n for n in range(len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), None)


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30), STOPS)
def test_the_tokens_that_are_kept_are_those_up_to_the_end_of_the_first_stop_string(ids, stops):
    end = tokens_until_stop(ids, stops, decode)
    assert end == first_end(ids, stops)
    if end is not None:
        assert tokens_until_stop(ids[:end], stops, decode) == end
        kept = text_until_stop(decode(ids), stops)
        assert kept == text_until_stop(decode(ids[:end]), stops) and decode(ids[:end]).startswith(kept)
        assert len(decode(ids[: end - 1])) < len(kept), "all but a part of the last token"
        assert any(kept == text_until_stop(decode(ids), stops, keep=False) + stop for stop in stops)
    else:
        assert text_until_stop(decode(ids), stops, keep=False) == decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "kept", "before"),
    [
        ("x</answer>\n", ["</answer>"], "x</answer>", "x"),
        ("abc", ["c", "bc"], "abc", "a"),
        ("abc", ["abc", "b"], "ab", "a"),
        ("abc", [], "abc", "abc"),
    ],
)
def test_of_several_stop_strings_the_one_that_ends_first_counts(text, stops, kept, before):
    assert (text_until_stop(text, stops), text_until_stop(text, stops, keep=False)) == (kept, before)


def test_a_stop_string_of_one_token_is_this_token(tmp_path: Path):
    tokens, strings = divide_stops(tokenizer(tmp_path), ["</answer>", "<think> 14", "</answer>"])
    assert (tokens, strings) == ((ANSWERED,), ("<think> 14",))
    assert WORDS[ANSWERED] == "</answer>"


def test_a_character_that_is_half_decoded_ends_nothing():
    """Bytes of a character are tokens of their own; a decoder shows a replacement character for a part of it."""
    tokens = "né!".encode()
    reader = cast(Any, SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace")))
    assert tokens_until_stop(tokens, ["é"], reader.decode) == 3
