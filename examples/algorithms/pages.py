"""Writes what the recipes learned into their pages and docs/algorithms/results.md.

Run `python -m examples.algorithms.pages`. The figures are those of results.json, which has the rows of the results.json
that `examples.algorithms.compare` writes.
A table stands between `<!-- results -->`, which may have the name of the table, and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from examples.algorithms.compare import HERE, heading, load, recipes
from roll.configs.pipeline import RLVRConfig

DOCS = HERE.parents[1] / "docs"
FOLDER = DOCS / "recipes"

MAIN = ((0, 57), (0, 83), (1, 57), (1, 83), (4, 57))
"""Ratio and seed of the columns of docs/algorithms/results.md."""

LATER = ((0, 131), (1, 131), (0, 197), (1, 197))
"""Those of the models that were tried after the learning rates had been chosen."""

TABLE = re.compile(r"<!-- results ?(\w*) ?-->.*?<!-- end -->", re.DOTALL)


class Run(NamedTuple):
    """One run of results.json.

    Attributes:
        recipe: its name.
        ratio: `async_generation_ratio`; None where nothing is generated.
        seed: of what the recipe begins with, and of the run.
        accuracy: at the start, after 20 and after 40 steps; None where it was not recorded.
    """

    recipe: str
    ratio: int | None
    seed: int
    accuracy: list[float | None]


@cache
def runs() -> list[Run]:
    """All runs of results.json."""
    return [Run(**row) for row in json.loads((HERE / "results.json").read_text())]


def pages() -> dict[Path, str]:
    """Every page with results, and its text with the tables of results.json."""
    files = [*(FOLDER / f"{name}.md" for name in recipes()), DOCS / "algorithms/results.md"]
    return {file: filled(file.read_text(encoding="utf-8"), file.stem) for file in files}


def filled(text: str, page: str) -> str:
    """The text of a page with its tables replaced; a table without a name is that of the page's recipe."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[1]](page))
        return f"{match[0].partition('-->')[0]}-->\n\n{lines}\n\n<!-- end -->"

    return TABLE.sub(table, text)


def own_table(page: str) -> Iterator[str]:
    """Every run of the recipe of a page."""
    yield from header("run", "start", "20 steps", "40 steps")
    for run in runs():
        if run.recipe == page:
            yield row(heading(run.ratio, run.seed), *map(figure, run.accuracy))


def main_table(page: str) -> Iterator[str]:
    """The recipes of arithmetic by ratio and seed, after 40 steps."""
    yield from header("recipe", "learning rate", *(heading(*column) for column in MAIN))
    for name in recipes():
        config = load(name)
        if isinstance(config, RLVRConfig):
            rate = f"{config.actor_train.training_args.learning_rate:.0e}".replace("e-0", "e-")
            yield row(link(name), rate, *map(figure, ends(name, MAIN)))


def later_table(page: str) -> Iterator[str]:
    """The recipes that were tried on the later models, after 40 steps."""
    yield from header("recipe", *(heading(*column) for column in LATER))
    for name in recipes():
        if any(end is not None for end in ends(name, LATER)):
            yield row(link(name), *map(figure, ends(name, LATER)))


TABLES: dict[str, Callable[[str], Iterator[str]]] = {"": own_table, "main": main_table, "later": later_table}
"""Name of a table -> its lines, given the name of the page."""


def ends(recipe: str, columns: Sequence[tuple[int, int]]) -> list[float | None]:
    """The last accuracy of a recipe for each ratio and seed; None without such a run."""
    known = {(run.ratio, run.seed): run.accuracy[-1] for run in runs() if run.recipe == recipe}
    return [known.get(column) for column in columns]


def header(*cells: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*cells)
    yield "|---" * len(cells) + "|"


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def link(recipe: str) -> str:
    """The name of a recipe, with a link from docs/algorithms/results.md to its page."""
    return f"[`{recipe}`](../recipes/{recipe}.md)"


def figure(accuracy: float | None) -> str:
    """Two digits, or nothing."""
    return "" if accuracy is None else f"{accuracy:.2f}"


def main() -> None:
    """Writes all pages."""
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
