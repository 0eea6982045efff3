"""Every page has a Chinese twin, which says the same paragraph for paragraph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from os.path import normpath
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from scripts.chinese_pages import twins

ROOT = Path(__file__).parents[1]

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PUNCTUATION = re.compile(r"[^\w\- ]")


def twin_of(page: str) -> str:
    return "README.zh-CN.md" if page == "README.md" else page.replace("docs/", "docs/zh/", 1)


def english(path: str) -> str:
    """The page of which a path may be the twin."""
    return "README.md" if path == "README.zh-CN.md" else path.replace("docs/zh/", "docs/", 1)


@cache
def pages_with_twins() -> list[str]:
    pages = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", *(page for page in pages if not page.startswith("docs/zh/"))]


class Link(NamedTuple):
    """A link up to language: the English page, and the number of the heading in it."""

    target: str
    heading: int | str | None


class Block(NamedTuple):
    """A block of a page, and what its text must have in both languages, whatever the order."""

    line: int
    kind: str
    code: str
    spans: Counter[str]
    numbers: Counter[str]
    emphases: int
    links: Counter[Link]


@cache
def tokens_of(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


@cache
def slugs(page: str) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = tokens_of(page)
    titles = [after for token, after in zip(tokens, tokens[1:], strict=False) if token.type == "heading_open"]
    texts = ["".join(child.content for child in title.children or ()) for title in titles]
    return [PUNCTUATION.sub("", text.lower()).replace(" ", "-") for text in texts]


def link(page: str, address: str) -> Link:
    """What a page links to.

    Raises:
        AssertionError: The file or the heading does not exist, or a twin links to the English page of another twin.
    """
    if address.startswith(("http:", "https:", "mailto:")):
        return Link(address, None)
    path, _, anchor = unquote(address).partition("#")
    target = normpath(Path(page).parent / path) if path else page
    assert (ROOT / target).exists(), f"{page}: {address}: no such file"
    if english(page) != page and target in pages_with_twins() and target != english(page):
        raise AssertionError(f"{page}: {address}: its Chinese page is {twin_of(target)}")
    if not anchor:
        return Link(english(target), None)
    assert anchor in slugs(target), f"{page}: {address}: no such heading; use one of {slugs(target)}"
    return Link(english(target), slugs(target).index(anchor))


def block(page: str, token: Token) -> Block:
    children = token.children or []
    addresses = [str(child.attrs[key]) for child in children for key in ("href", "src") if key in child.attrs]
    texts = [child.content for child in children if child.type in ("text", "image")]
    return Block(
        line=token.map[0] + 1 if token.map else 0,
        kind=f"{token.type} {token.tag}".strip(),
        code=token.content if token.type in ("fence", "code_block") else "",
        spans=Counter(child.content for child in children if child.type == "code_inline"),
        numbers=Counter(NUMBER.findall(" ".join(texts))),
        emphases=sum(child.type in ("strong_open", "em_open") for child in children),
        links=Counter(link(page, address) for address in addresses),
    )


def differences(page: str) -> Iterator[str]:
    """What a page and its twin do not have in common, in the order of the page."""
    twin = twin_of(page)
    if not (ROOT / twin).exists():
        yield f"{page}: {twin} does not exist"
        return
    blocks = ([block(name, token) for token in tokens_of(name)] for name in (page, twin))
    for ours, theirs in zip(*blocks, strict=False):
        for field in Block._fields[1:]:
            here, there = getattr(ours, field), getattr(theirs, field)
            if here != there:
                only = (dict(here - there), dict(there - here)) if isinstance(here, Counter) else (here, there)
                yield f"{page}:{ours.line} {field} {only[0]!r}; {twin}:{theirs.line} {field} {only[1]!r}"
                if field in ("kind", "code"):
                    return
    lengths = [len(tokens_of(name)) for name in (page, twin)]
    if lengths[0] != lengths[1]:
        yield f"{page}: {lengths[0]} blocks; {twin}: {lengths[1]}"


@pytest.mark.parametrize("page", pages_with_twins())
def test_a_page_and_its_chinese_twin_say_the_same(page: str) -> None:
    first = next(differences(page), None)
    assert first is None, first


def test_a_twin_belongs_to_a_page() -> None:
    twins = {str(path.relative_to(ROOT)) for path in (ROOT / "docs/zh").rglob("*.md")}
    assert twins - {twin_of(page) for page in pages_with_twins()} == set()


def test_generated_twins_are_up_to_date() -> None:
    """Every help text of a key has its Chinese: another one is named, as is a text that no page has any more."""
    pages, wrong = twins()
    assert wrong == []
    for file, text in pages.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.relative_to(ROOT)}: run: make docs"


def test_readmes_link_to_each_other() -> None:
    assert "(README.zh-CN.md)" in (ROOT / "README.md").read_text()
    assert "(README.md)" in (ROOT / "README.zh-CN.md").read_text()
