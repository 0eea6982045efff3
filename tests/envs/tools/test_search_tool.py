"""BM25 against its formula, and passages of the user's files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.base.errors import RunError
from roll.envs.tools.bm25 import K1, B, Bm25Index, words_of
from roll.envs.tools.calls import ToolCall
from roll.envs.tools.search_tool import SearchOptions, SearchTool, read_passages

sentences = st.lists(st.sampled_from(["the", "tide", "moon", "Sea", "rises"]), max_size=8).map(" ".join)


def by_formula(passages: list[str], query: str) -> list[float]:
    texts = [words_of(passage) for passage in passages]
    mean = max(sum(map(len, texts)) / len(texts), 1)
    scores = []
    for text in texts:
        score = 0.0
        for word in words_of(query):
            n, tf = sum(word in other for other in texts), text.count(word)
            idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
            score += idf * tf / (tf + K1 * (1 - B + B * len(text) / mean)) if tf else 0.0
        scores.append(score)
    return scores


@given(st.lists(sentences, min_size=1, max_size=6), sentences)
def test_scores_are_those_of_the_formula_and_the_best_come_first(passages, query):
    index, expected = Bm25Index(passages), by_formula(passages, query)
    assert index.scores(query) == pytest.approx(expected)
    best = index.best(query, 3)
    assert [expected[at] for at in best] == pytest.approx(sorted((s for s in expected if s > 0), reverse=True)[:3])
    assert len(set(best)) == len(best)


def test_no_passages_find_nothing():
    assert Bm25Index([]).best("tide", 3) == []


def test_rows_are_passages_and_texts_are_divided_at_paragraphs(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"title": "Tide", "text": "The sea rises."}\n\n{"contents": "No title"}\n')
    assert list(read_passages(rows, 3)) == ["Tide: The sea rises.", "No title"]
    text = tmp_path / "text.md"
    text.write_text("one two\n\nthree\nfour five\n\n\n\nsix\n\na b c d e f g h i")
    assert list(read_passages(text, 4)) == ["one two", "three four five six", "a b c d", "e f g h", "i"]


@given(st.lists(st.text("ab \n", max_size=30), max_size=5), st.integers(1, 6))
def test_no_word_is_lost_when_a_text_is_divided(tmp_path_factory, paragraphs, longest):
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    text = "\n\n".join(paragraphs)
    file.write_text(text)
    passages = list(read_passages(file, longest))
    assert " ".join(passages).split() == text.split()
    assert all(0 < len(passage.split()) <= longest for passage in passages)


@pytest.mark.parametrize(
    ("row", "problem"), [("{", "is no JSON"), ('{"id": 1}', "has no text; name it text or contents")]
)
def test_a_row_without_a_passage_is_an_error_with_its_line(tmp_path: Path, row: str, problem: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "fine"}) + "\n" + row)
    with pytest.raises(RunError, match=f"rows.jsonl:2: {problem}"):
        list(read_passages(file, 9))


def test_a_search_returns_the_best_passages_numbered(tmp_path: Path):
    (tmp_path / "a.md").write_text("The moon pulls the sea.\n\nA tide rises twice a day.")
    (tmp_path / "b.jsonl").write_text('{"title": "Tide", "text": "The moon makes the tide."}')
    tool = SearchTool(SearchOptions(files=[f"{tmp_path}/*"], results=2, passage_words=6))
    found = tool.call(ToolCall("search", {"query": "moon and tide"}))
    assert found.startswith("[1] Tide: The moon makes the tide.\n\n[2] ")
    assert tool.call(ToolCall("search", {"query": "volcano"})) == "(nothing was found)"
    assert tool.schemas()[0]["function"]["name"] == "search"


def test_a_pattern_without_a_file_is_an_error(tmp_path: Path):
    [problem] = SearchOptions(files=[f"{tmp_path}/*.md"]).check()
    assert problem.path == "files" and "*.md is no file of" in problem.message
    [problem] = SearchOptions().check()
    assert problem.message.startswith("is empty")
