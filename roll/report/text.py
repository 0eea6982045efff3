"""The words of the page and of `roll explain` in English and Simplified Chinese, and the forms of numbers."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files


@cache
def static_text(name: str) -> str:
    return (files("roll.report") / "static" / name).read_text(encoding="utf-8")


TEXTS: Mapping[str, tuple[str, str]] = json.loads(static_text("words.json"))
"""English and Chinese by key, with fields in braces; `f_` begins keys of findings, and `e_` those of explanations."""


@dataclass(frozen=True)
class Text:
    """A text by its key in TEXTS, with the values of its fields; a value may be a text itself."""

    key: str
    values: Mapping[str, object] = field(default_factory=dict)

    def in_language(self, index: int) -> str:
        """The text in English (0) or Chinese (1)."""
        values = {name: v.in_language(index) if isinstance(v, Text) else str(v) for name, v in self.values.items()}
        return TEXTS[self.key][index].format(**values)

    def html(self) -> str:
        """Both languages as escaped HTML, of which the page shows one."""
        return bilingual(self.in_language(0), self.in_language(1))


def text(key: str, **values: object) -> Text:
    return Text(key, values)


def said(key: str, **values: object) -> str:
    """A text in the language of this terminal: Chinese where the locale says so, else English."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return Text(key, values).in_language(int(locale.startswith("zh")))


def bilingual(english: str, chinese: str) -> str:
    """Two texts as escaped HTML, of which the page shows one."""
    english, chinese = html.escape(english), html.escape(chinese)
    return english if english == chinese else f"<span lang=en>{english}</span><span lang=zh>{chinese}</span>"


def digits(value: float) -> str:
    """Three significant digits; thousands with separators."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
