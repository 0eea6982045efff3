"""JSON that a model or a program has written."""

from __future__ import annotations

import json
from typing import Any

MAX_NESTING = 64
"""Most levels of a JSON value; a model that repeats brackets writes more."""


def read_json(text: str | bytes) -> Any:
    """A JSON value of at most `MAX_NESTING` levels, whose texts can be encoded.

    Raises:
        ValueError: the text is no such value.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"values are nested in more than {MAX_NESTING} levels") from None
    _check_json(value, MAX_NESTING)
    return value


def _check_json(value: Any, levels: int) -> None:
    if isinstance(value, str):
        value.encode()  # a half of a surrogate pair is a UnicodeEncodeError, which is a ValueError
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"values are nested in more than {MAX_NESTING} levels")
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_json(item, levels - 1)
