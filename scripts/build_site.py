"""Builds the site in English and Chinese: `python -m scripts.build_site` writes output/site.

zensical reads a copy of docs/ for each language. In a copy, diagrams (mermaid) are drawn as SVG and formulas (math) as
MathML, so that a page asks no server for a script; formulas in tables are those of scripts/site/formulas.toml. A page
without a Chinese twin stays in English. A link to a file outside of docs/ leads to a page with the text of that file.
The search has each key and each metric as a section of its own, which ranks before the pages that mention it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from os.path import normpath, relpath
from pathlib import Path
from typing import Any, Literal

import latex2mathml.converter
import mermaidx
import tomli
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "output" / "site-source"
SITE = ROOT / "output" / "site"
PARTS = ROOT / "scripts" / "site"
"""Style sheet, and templates that replace those of the theme."""

LANGUAGES = ("en", "zh")
HOMES = ("README.md", "README.zh-CN.md")
"""Pages outside of docs/ whose place on the site is its first page."""

LANGUAGE_OF_SUFFIX = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml", ".json": "json"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE_FORMULA = re.compile(r"\$`([^`]+)`\$")
LINE_ABOVE = re.compile(r'<mover>(<mrow>.*?</mrow>)<mo accent="true">&#x02015;</mo></mover>')
CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
KEY_ROW = re.compile(r"<tr>\n<td><code>(.*?)</code></td>(.*?)</tr>", re.DOTALL)
KEY_PAGES = re.compile(r"configuration/\w+/$|metrics/$")
BREAK = re.compile(r"(?<=[a-z;])[_./:](?=[a-z])(?!py\b|yaml\b)", re.IGNORECASE)
ROW = re.compile(r"^\|.*$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

TABLE_FORMULAS: dict[str, str] = {
    plain.replace("|", r"\|"): latex
    for plain, latex in tomli.loads((PARTS / "formulas.toml").read_text(encoding="utf-8")).items()
}
"""A formula as a row of a table has it -> LaTeX."""
_LONGEST_FIRST = "|".join(map(re.escape, sorted(TABLE_FORMULAS, key=len, reverse=True)))
PLAIN_FORMULA = re.compile(rf"(?<![A-Za-z0-9_^])({_LONGEST_FIRST})(?![A-Za-z0-9_^])|`[^`]*`")
"""A formula of TABLE_FORMULAS, the longest that fits, or code, which is none."""

COLOURS = {
    "#010101": "var(--md-default-fg-color)",
    "#020202": "var(--md-default-fg-color--light)",
    "#030303": "var(--md-code-bg-color)",
    "#040404": "var(--md-default-fg-color--lighter)",
    "#050505": "var(--md-default-bg-color)",
    "#060606": "var(--md-typeset-a-color)",
}
"""Colours of diagrams as mermaid gets them, and as the page has them, in light and dark."""

DIAGRAM_OPTIONS = {
    "theme": "base",
    "flowchart": {"htmlLabels": False, "nodeSpacing": 25, "rankSpacing": 25, "wrappingWidth": 120, "padding": 8},
    "themeVariables": {
        "fontFamily": "DejaVu Sans, sans-serif",
        "fontSize": "15px",
        "background": "#050505",
        "primaryColor": "#030303",
        "primaryTextColor": "#010101",
        "primaryBorderColor": "#040404",
        "secondaryColor": "#030303",
        "tertiaryColor": "#050505",
        "lineColor": "#020202",
        "textColor": "#010101",
        "mainBkg": "#030303",
        "nodeBorder": "#040404",
        "clusterBkg": "#050505",
        "clusterBorder": "#040404",
        "edgeLabelBackground": "#050505",
        "titleColor": "#010101",
        "actorBkg": "#030303",
        "actorBorder": "#040404",
        "actorTextColor": "#010101",
        "actorLineColor": "#040404",
        "signalColor": "#020202",
        "signalTextColor": "#010101",
        "noteBkgColor": "#030303",
        "noteTextColor": "#010101",
        "noteBorderColor": "#040404",
        "xyChart": {"plotColorPalette": "#060606"},
    },
}


def diagram(source: str) -> str:
    """The SVG of a diagram in mermaid's language, in the colours of the page and at least 0.6 of its size."""
    svg = mermaidx.render(source, config=DIAGRAM_OPTIONS).svg()
    width = float(re.findall(r"max-width: ([\d.]+)px", svg)[0])
    svg = svg.replace("max-width:", f"min-width: {0.6 * width:.0f}px; max-width:", 1)
    for name, colour in COLOURS.items():
        svg = svg.replace(name, colour)
    one_line = re.sub(r"\s*\n\s*", " ", svg)
    return f'<div class="diagram" data-search-exclude>{one_line}</div>\n'


def mathml(source: str, display: Literal["inline", "block"]) -> str:
    """The MathML of a formula; a line above is as wide as what is below, and a space follows log."""
    drawn = latex2mathml.converter.convert(source, display=display)
    drawn = LINE_ABOVE.sub(r'<mrow class="mean">\1</mrow>', drawn)
    return re.sub(r"<mi>log</mi>(?=<m)(?!<mo)", '<mi>log</mi><mspace width="0.17em" />', drawn)


@cache
def formula(source: str) -> str:
    """The MathML of a formula in LaTeX."""
    return f'<div class="formula">{mathml(source.strip(), "block")}</div>\n'


def inline_formula(source: str) -> str:
    """The MathML of a formula within a line."""
    return f"<span>{mathml(source, 'inline')}</span>".replace("_", "&#95;")


def typeset(row: str) -> str:
    """A row of a table with its plain formulas drawn."""
    return PLAIN_FORMULA.sub(lambda match: inline_formula(TABLE_FORMULAS[match[1]]) if match[1] else match[0], row)


def diagrams() -> dict[str, str]:
    """The SVG of each diagram of docs/, drawn on all cores: drawing is most of the time of a build."""
    fences = (fence for page in DOCS.rglob("*.md") for fence in FENCE.findall(page.read_text(encoding="utf-8")))
    sources = sorted({source for language, source in fences if language == "mermaid"})
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return dict(zip(sources, pool.map(diagram, sources), strict=True))


DRAWN: dict[str, Callable[[str], str]] = {"math": formula}


class Copy:
    """The pages of one language in the folder that zensical reads.

    Attributes:
        folder: that folder.
        waiting: files outside of docs/ that a page links to and that have no page yet, by path from the root.
    """

    def __init__(self, language: str) -> None:
        self.language = language
        self.folder = SOURCE / language
        self.waiting: list[str] = []
        self._outside: set[str] = set()

    def write(self) -> None:
        """Writes all pages and pictures, and a page for each file outside of docs/ that they link to."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for file in self._files():
            name = file.relative_to(DOCS)
            twin = DOCS / "zh" / name
            self._write(twin if self.language == "zh" and twin.exists() else file, str(name))
        while self.waiting:
            path = self.waiting.pop()
            self._write(ROOT / path, outside(path))
        (self.folder / "site.css").write_text((PARTS / "site.css").read_text())

    def _files(self) -> Iterator[Path]:
        return (file for file in sorted(DOCS.rglob("*")) if file.is_file() and DOCS / "zh" not in file.parents)

    def _write(self, file: Path, name: str) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        page = str(file.relative_to(ROOT))
        if file.is_dir():
            files = [each.name for each in sorted(file.iterdir()) if each.suffix in (".md", *LANGUAGE_OF_SUFFIX)]
            text = self.converted(
                "\n".join([f"# {page}\n", *(f"- [{each}]({each})" for each in files)]), page + "/", name
            )
        elif file.suffix == ".md":
            text = self.converted(file.read_text(encoding="utf-8"), page, name)
        elif name.startswith("files/"):
            code = file.read_text(encoding="utf-8")
            text = f"# {file.name}\n\n`{page}`\n\n````{LANGUAGE_OF_SUFFIX.get(file.suffix, 'text')}\n{code}````\n"
        else:
            shutil.copyfile(file, target)
            return
        hidden = "---\nsearch:\n  exclude: true\n---\n" if name.startswith("files/") else ""
        target.write_text(hidden + text, encoding="utf-8")

    def converted(self, text: str, page: str, name: str) -> str:
        """The text of a page with drawn blocks, and with links to places on the site.

        Args:
            text: the page.
            page: its path from the root.
            name: its path on the site.
        """
        parts, end = [], 0
        for match in FENCE.finditer(text):
            parts.append(self._linked(text[end : match.start()], page, name))
            parts.append(DRAWN[match[1]](match[2]) if match[1] in DRAWN else match[0])
            end = match.end()
        return "".join([*parts, self._linked(text[end:], page, name)])

    def _linked(self, text: str, page: str, name: str) -> str:
        def link(match: re.Match[str]) -> str:
            if re.match(r"[a-z]+:|#", match[2]):
                return match[0]
            path, _, anchor = match[2].partition("#")
            target = normpath(f"{page.rpartition('/')[0]}/{path}".lstrip("/"))
            place = self._place(target, anchor)
            twin = target.replace("docs/", "docs/zh/", 1)
            if anchor and self.language == "zh" and target != twin and (ROOT / twin).exists():
                anchor = anchors(twin)[anchors(target).index(anchor)]
            return f"{match[1]}{relpath(place, Path(name).parent)}{'#' * bool(anchor)}{anchor}{match[3]}"

        drawn = ROW.sub(lambda match: typeset(match[0]), text)
        return LINK.sub(link, INLINE_FORMULA.sub(lambda match: inline_formula(match[1]), drawn))

    def _place(self, path: str, anchor: str) -> str:
        """Where a file or folder of the repository is on the site."""
        if path in HOMES and not anchor:
            return "index.md"
        if path.startswith("docs/"):
            return path.removeprefix("docs/").removeprefix("zh/")
        if (ROOT / path / "README.md").exists():
            path = f"{path}/README.md"
        if path not in self._outside and (ROOT / path).exists():
            self._outside.add(path)
            self.waiting.append(path)
        return outside(path)


@cache
def anchors(page: str) -> list[str]:
    """The anchors of a page's headings in order; those of its Chinese twin have the same order."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*?)\s*$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def outside(path: str) -> str:
    """The page of a file outside of docs/."""
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def config(language: str) -> dict[str, Any]:
    """What zensical reads for a language: zensical.toml with the names of the sections in that language."""
    project: dict[str, Any] = tomli.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    sections = project["extra"].pop("sections")
    project["nav"] = [named(item, sections if language == "zh" else {}) for item in project["nav"]]
    project["docs_dir"] = str((SOURCE / language).relative_to(ROOT))
    project["site_dir"] = str((SITE / "zh" if language == "zh" else SITE).relative_to(ROOT))
    homes = {"en": "../", "zh": ""} if language == "zh" else {"en": "", "zh": "zh/"}
    for each in project["extra"]["alternate"]:
        each["link"] = homes[each["lang"]]
    project["theme"] |= {"language": language, "custom_dir": "scripts/site/theme"}
    return project


def named(item: Any, sections: dict[str, str]) -> Any:
    """An item of the navigation with the names of `sections`, and with the files of patterns."""
    if isinstance(item, str):
        return item
    [(title, items)] = item.items()
    return {sections.get(title, title): [named(each, sections) for part in items for each in expanded(part)]}


def expanded(item: Any) -> list[Any]:
    """The pages of a pattern such as recipes/*.md, but for its README; anything else alone."""
    if not isinstance(item, str) or "*" not in item:
        return [item]
    return [str(file.relative_to(DOCS)) for file in sorted(DOCS.glob(item)) if file.name != "README.md"]


def pages(items: list[Any]) -> Iterator[str]:
    """The pages of a navigation in order."""
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            yield from pages([page for part in item.values() for page in part])


def with_breaks(cell: re.Match[str]) -> str:
    """A cell of a table whose code may also be broken behind a mark between two letters."""
    return re.sub(r"<code>[^<]+", lambda code: BREAK.sub(r"\g<0><wbr>", code[0]), cell[0])


def name_rows(home: Path) -> None:
    """Gives each row of a key or a metric an anchor and a section in the search, which of equals shows the first."""
    index = home / "search.json"
    search = json.loads(index.read_text(encoding="utf-8"))
    rows = []
    for page in filter(lambda item: KEY_PAGES.match(item["location"]), search["items"]):
        file = home / page["location"] / "index.html"
        parts = KEY_ROW.split(file.read_text(encoding="utf-8"))
        for at, (key, rest) in enumerate(zip(parts[1::3], parts[2::3], strict=True)):
            anchor = re.sub(r"&[lg]t;", "", key)
            found = {"title": f"<code>{key}</code>", "path": [key, *page["path"]], "text": rest, "level": 2}
            rows.append(page | found | {"location": f"{page['location']}#{anchor}"})
            parts[3 * at + 1 : 3 * at + 3] = f'<tr id="{anchor}">\n<td><code>{key}</code></td>', f"{rest}</tr>"
        file.write_text("".join(parts), encoding="utf-8")
    search["items"] = sorted(rows, key=lambda row: len(row["title"])) + search["items"]
    index.write_text(json.dumps(search, ensure_ascii=False), encoding="utf-8")


def main() -> int:
    """Builds both languages.

    Returns:
        0, or the exit code of zensical, which is another one for a link that leads nowhere.
    """
    shutil.rmtree(SITE, ignore_errors=True)
    DRAWN["mermaid"] = diagrams().__getitem__
    for language in LANGUAGES:
        Copy(language).write()
        file = ROOT / f".zensical-{language}.yml"  # its folder is what zensical takes paths from
        file.write_text(yaml.safe_dump(config(language), allow_unicode=True), encoding="utf-8")
        try:
            command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(file)]
            code = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}, check=False).returncode
        finally:
            file.unlink()
        if code:
            return code
    for home in (SITE, SITE / "zh"):
        name_rows(home)
    for file in SITE.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        file.write_text(CELL.sub(with_breaks, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
