"""Writes the data files that the tests of this folder read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def jsonl(folder: Path, *rows: Any, name: str = "data.jsonl") -> str:
    """Writes a file with one line per row: objects as JSON, texts unchanged."""
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(number: int, **columns: Any) -> dict[str, Any]:
    return {"id": f"p{number}", "tag": "math_rule", "prompt": f"{number}+1=", "ground_truth": number + 1} | columns
