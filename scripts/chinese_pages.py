"""Writes the Chinese twins of the generated pages: `python -m scripts.chinese_pages`.

docs/zh/texts.json has the Chinese of every text of these pages: help of keys, formulas, titles and paragraphs. It is a
table by the English text, so a text that changed has no translation until someone has written it, and a text that
several roles share is translated once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TEXTS = DOCS / "zh" / "texts.json"

WHOLE = ("configuration.md", "configuration/*.md", "metrics.md", "other_spellings.md", "recipes/*.md")
"""Pages whose twins are written as a whole: generated ones, and recipes, which are much the same."""

PART = re.compile(r"^<!-- (?!end)([\w ]+) -->\n\n(.*?)\n\n<!-- end -->$", re.MULTILINE | re.DOTALL)
"""A generated part of a page that is written by hand."""

COPIED = ("source", "keys", "known", "recipe", "option", "name")
"""Columns that are the same in both languages, but for cells that the table of texts has."""

PHRASES = {
    r"\btext\b": "文本",
    "a whole number": "整数",
    "a number": "数",
    "true or false": "true 或 false",
    r"a list \((.*?) each\)": r"列表（每项为\1）",
    "a section of `key: value` lines": "由 `key: value` 行组成的部分",
    "one of ": "取值之一：",
    r"(?<=[数本）]) or ": "或 ",
    " or ": " 或 ",
    "(?<=[^ ]), (at least|above|at most|below)": r"，\1",
    " and (?=at most|below)": "，",
    "at least": "至少",
    "above": "大于",
    "at most": "至多",
    "below": "小于",
}
"""Parts of the column `type`, in the order in which they are replaced."""

RUN = re.compile(r"(?:ratio (\d+), )?seed (\d+)")
RECIPE = re.compile(
    r"Of (\S+), with inherited ones that matter; for others see "
    r"\[Settings of all recipes\]\(README.md#settings-of-all-recipes\)\."
)
"""The sentence above the settings of each recipe."""

LINK = re.compile(r"(?<=\]\()([^)#:]+)(?=[)#])")
CELLS = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`[^`]*`( \([a-z_, ]+\)$)?")
"""Code, and the pipelines that a key is of."""


class Translator:
    """Translates Markdown by the table of texts.

    Attributes:
        used: English texts that were looked up.
        missing: English texts without a Chinese one.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts
        self.used: set[str] = set()
        self.missing: set[str] = set()

    def page(self, markdown: str, path: str) -> str:
        """The Chinese of the page at `path` in docs/, or of a part of it; missing texts stay English."""
        blocks = (self._block(block) for block in markdown.strip("\n").split("\n\n"))
        return LINK.sub(lambda link: target(link[1], path), "\n\n".join(blocks))

    def _block(self, block: str) -> str:
        if block.startswith(("    ", "<!--")):
            return block
        if block.startswith("|"):
            return "\n".join(self._table(block))
        if block.startswith("#"):
            level, _, title = block.partition(" ")
            return f"{level} {self._title(title)}"
        if block.startswith("- "):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            return "\n".join(f"- {self._label(item.strip()) or self._text(item)}" for item in items)
        return self._text(block)

    def _table(self, table: str) -> Iterator[str]:
        rows = [[cell.strip() for cell in CELLS.split(line)[1:-1]] for line in table.splitlines()]
        head, rule, *body = rows
        yield line([self._title(cell) for cell in head])
        yield table.splitlines()[1]
        for row in body:
            yield line([self._cell(name, cell) for name, cell in zip(head, row, strict=True)])

    def _cell(self, column: str, cell: str) -> str:
        if cell not in self._texts and (column in COPIED or not re.search("[a-z]{2}", CODE.sub("", cell))):
            return cell
        if column == "type":
            for english, chinese in PHRASES.items():
                cell = re.sub(english, chinese, cell)
            return cell
        if column == "groups":
            return "、".join(map(self._title, cell.split(", ")))
        if label := self._label(cell) or settings(cell):
            return label
        variants, colon, rest = cell.partition(": ")
        if colon and cell not in self._texts and re.fullmatch(r"[a-z_\d, ]+", variants):
            return f"{variants.replace(', ', '、')}：{self._text(rest)}"
        return self._text(cell)

    def _label(self, text: str) -> str:
        link = re.fullmatch(r"\[([^\]]+)\](\([^)]+\))", text)
        return f"[{self._title(link[1])}]{link[2]}" if link else ""

    def _title(self, title: str) -> str:
        if settings(title):
            return settings(title)
        return self._text(title) if re.search("[a-z]{2}", CODE.sub("", title)) else title

    def _text(self, text: str) -> str:
        text = re.sub(r"\s+", " ", text.strip()).replace(r"\|", "|")
        if (recipe := RECIPE.fullmatch(text)) is not None:
            return f"取自 {recipe[1]}，以及继承的重要设置；其他设置见[所有配方的设置](README.md#所有配方的设置)。"
        (self.used if text in self._texts else self.missing).add(text)
        return self._texts.get(text, text).replace("|", r"\|")


def settings(text: str) -> str:
    """The Chinese of "ratio 1, seed 57" or "seed 57"; empty for any other text."""
    run = RUN.fullmatch(text)
    ratio = f"异步比 {run[1]}，" if run and run[1] else ""
    return f"{ratio}种子 {run[2]}" if run else ""


def line(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def target(address: str, page: str) -> str:
    """Where a link of an English page leads in its twin, which is a folder deeper: to a twin where there is one."""
    linked = normpath(PurePosixPath(page).parent / address)
    if linked.endswith(".md") and not linked.startswith(".."):
        return address
    return relpath(linked, PurePosixPath("zh", page).parent)


def twins() -> tuple[dict[Path, str], list[str]]:
    """The text of every twin that is generated or has a generated part; and what is wrong with docs/zh/texts.json."""
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))
    translator = Translator(texts)
    pages = {}
    for file in (file for pattern in WHOLE for file in sorted(DOCS.glob(pattern))):
        path = file.relative_to(DOCS).as_posix()
        pages[DOCS / "zh" / path] = translator.page(file.read_text(encoding="utf-8"), path) + "\n"
    for file in sorted(DOCS.rglob("*.md")):
        path = file.relative_to(DOCS).as_posix()
        parts = dict(PART.findall(file.read_text(encoding="utf-8")))
        if parts and not path.startswith(("zh/", "recipes/")):
            chinese = {name: translator.page(part, path) for name, part in parts.items()}
            pages[DOCS / "zh" / path] = with_parts(
                (DOCS / "zh" / path).read_text(encoding="utf-8"), chinese.__getitem__
            )
    wrong = [f"docs/zh/texts.json: no Chinese of {text!r}; add it" for text in sorted(translator.missing)]
    wrong += [f"docs/zh/texts.json: no page has {text!r}; remove it" for text in sorted(texts.keys() - translator.used)]
    return pages, wrong


def with_parts(page: str, part_of: Callable[[str], str]) -> str:
    """A page with the text of each part replaced."""
    return PART.sub(lambda part: f"<!-- {part[1]} -->\n\n{part_of(part[1])}\n\n<!-- end -->", page)


if __name__ == "__main__":
    written, wrong = twins()
    for file, text in written.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if wrong:
        raise SystemExit("\n".join(wrong))
