"""The text of the documentation, for tests of its examples."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def text_of(subject: str) -> str:
    """The page of a subject and the pages in its folder, such as rewards.md and rewards/*.md."""
    pages = [DOCS / f"{subject}.md", *sorted((DOCS / subject).glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
