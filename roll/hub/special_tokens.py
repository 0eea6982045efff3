"""The tokenizer of a model folder and its special tokens; needs neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.hub.names import local_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKEN_NAMES = (TOKENIZER_CONFIG, "special_tokens_map.json")
"""Files with the texts of special tokens; the first that names one counts."""


def read_tokenizer(model: str | None) -> Tokenizer | None:
    """The tokenizer.json of a model; None where there is none that can be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(local_model(model or "") / "tokenizer.json"))
    except Exception:  # the library raises nothing more specific; `check_inputs` reports a broken tokenizer
        return None


def special_token(folder: Path, name: str) -> str | None:
    """The text of a special token, such as `pad_token` or `eos_token`; None where no file of the folder names it."""
    for file in TOKEN_NAMES:
        token = _read(folder / file).get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None


def special_token_id(folder: Path, name: str) -> int | None:
    """The id of a special token; None where the folder has no such token, or no file that gives its id."""
    text = special_token(folder, name)
    if text is None:
        return None
    tokenizer = _read(folder / "tokenizer.json")
    decoder = _read(folder / TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
    added = [*(tokenizer.get("added_tokens") or []), *({**entry, "id": int(key)} for key, entry in decoder.items())]
    ids = {entry["content"]: entry["id"] for entry in reversed(added)}
    return ids[text] if text in ids else _vocabulary_id(tokenizer, text)


def _vocabulary_id(tokenizer: dict[str, Any], text: str) -> int | None:
    """The id of a token in the vocabulary of tokenizer.json: a mapping to ids, or pieces in the order of their ids."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        return next((number for number, (piece, _) in enumerate(vocabulary) if piece == text), None)
    return vocabulary.get(text)


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
