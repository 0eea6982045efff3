"""Special tokens of a model folder, from whichever of its files names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_math.prepare import END, PAD, make_tokenizer
from roll.hub.special_tokens import special_token, special_token_id

ADDED = {"added_tokens": [{"id": 7, "content": "<pad>"}, {"id": 8, "content": "<end>"}]}
VOCABULARY = {"model": {"vocab": {"a": 0, "<pad>": 7}}}
PIECES = {"model": {"vocab": [[text, 0.0] for text in ("a", "b", "c", "d", "e", "f", "g", "<pad>")]}}
NAMED = {"pad_token": "<pad>"}


def test_tokens_of_a_saved_tokenizer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for name, text in (("pad_token", PAD), ("eos_token", END)):
        assert special_token(tmp_path, name) == text
        assert special_token_id(tmp_path, name) == getattr(tokenizer, f"{name}_id")
    assert special_token(tmp_path, "bos_token") is None


@pytest.mark.parametrize(
    ("number", "files"),
    [
        (7, {"tokenizer_config": NAMED, "tokenizer": ADDED}),
        (7, {"tokenizer_config": {"pad_token": {"content": "<pad>"}}, "tokenizer": ADDED}),
        (7, {"special_tokens_map": {"pad_token": {"content": "<pad>"}}, "tokenizer": ADDED}),
        (7, {"tokenizer_config": NAMED | {"added_tokens_decoder": {"7": {"content": "<pad>"}}}}),
        (7, {"tokenizer_config": NAMED, "tokenizer": VOCABULARY}),
        (7, {"tokenizer_config": NAMED, "tokenizer": PIECES}),
        (7, {"tokenizer_config": NAMED, "tokenizer": ADDED | {"model": {"vocab": {"<pad>": 3}}}}),
        (None, {}),
        (None, {"tokenizer_config": {"pad_token": None}, "tokenizer": ADDED}),
        (None, {"tokenizer_config": "[]", "tokenizer": ADDED}),
        (None, {"tokenizer_config": NAMED, "tokenizer": "{"}),
        (None, {"tokenizer_config": NAMED, "tokenizer": {"model": {"vocab": {"a": 0}}}}),
        (None, {"tokenizer_config": NAMED, "tokenizer": {"model": {"vocab": [["a", 0.0]]}}}),
        (None, {"tokenizer_config": NAMED, "tokenizer": {"model": None}}),
    ],
)
def test_the_id_of_a_token_is_found_where_folders_have_it(
    tmp_path: Path, number: int | None, files: dict[str, Any]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert special_token_id(tmp_path, "pad_token") == number
