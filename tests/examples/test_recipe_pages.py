"""docs/recipes has a page for each recipe, with the values of its settings and the results of results.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.algorithms import compare, pages
from roll.base.schema import value_at
from roll.trackers import metrics

SETTING = re.compile(r"^\| `([\w.]+)` \| `(.+?)` \| (.+) \|$", re.MULTILINE)
METRIC = re.compile(r"`((?:actor|advantage|correction|critic|env|ledger|reward|rollout|staleness|time|val)/[^`]+)`")
PLUMBING = re.compile(r"exp_name|defaults|output_dir|save_\w+|\w+\.(?:model_args|strategy_args|device_mapping).*")
"""Keys of a recipe that say where and how it runs, not what it computes; the index has what all recipes share."""
SHARED = ("max_steps", "eval_steps")


def text_of(name: str) -> str:
    return (pages.FOLDER / f"{name}.md").read_text(encoding="utf-8")


def keys_of(node: Any, path: str = "") -> list[str]:
    """Paths of the keys of a YAML mapping; the losses of a mixture are one value."""
    if not isinstance(node, dict) or path.endswith("pg_variant"):
        return [path]
    return [key for name, value in node.items() for key in keys_of(value, f"{path}.{name}".removeprefix("."))]


def test_every_recipe_has_a_page_and_every_page_a_recipe():
    assert {file.stem for file in pages.FOLDER.glob("*.md")} == {*compare.recipes(), "README"}
    assert all(f"]({name}.md)" in text_of("README") for name in compare.recipes())


def test_pages_have_the_results_of_the_file():
    outdated = [file.name for file, text in pages.pages().items() if file.read_text(encoding="utf-8") != text]
    assert outdated == [], "run `python -m examples.algorithms.pages`"
    assert {run.recipe for run in pages.runs()} == set(compare.recipes())
    assert all("<!-- results -->" in text_of(name) for name in compare.recipes())


@pytest.mark.parametrize("name", [*compare.recipes(), "README"])
def test_settings_have_the_values_of_the_recipe(name: str):
    config, settings = compare.load("grpo" if name == "README" else name), SETTING.findall(text_of(name))
    written = {key: yaml.safe_load(value) for key, value, _ in settings}
    assert len(settings) > 4 and {key: value_at(config, key) for key in written} == written
    assert all(len(reason) > 2 for _, _, reason in settings)


@pytest.mark.parametrize("name", compare.recipes())
def test_a_page_explains_every_key_of_its_recipe(name: str):
    recipe = yaml.safe_load((compare.HERE / f"{name}.yaml").read_text())
    listed = {key for key, _, _ in SETTING.findall(text_of(name))}
    given = {key for key in keys_of(recipe) if not PLUMBING.fullmatch(key) and key not in SHARED}
    assert given - listed == set()


@pytest.mark.parametrize("name", compare.recipes())
def test_metrics_of_a_page_exist(name: str):
    known = set(re.findall(r"^\| `([^`]+)` \|", metrics.markdown(), re.MULTILINE))
    patterns = [re.compile(re.sub(r"<\w+>", r"[\\w-]+", each)) for each in known]
    named = METRIC.findall(text_of(name))
    assert (
        named and [each for each in named if each not in known and not any(p.fullmatch(each) for p in patterns)] == []
    )


def test_a_table_replaces_what_stands_between_its_marks(monkeypatch: pytest.MonkeyPatch):
    runs = [
        pages.Run("rloo", 0, 57, [0.5, None, 0.756]),
        pages.Run("rloo", 4, 83, [0.25, 0.5, 0.75]),
        pages.Run("dpo", None, 57, [0.0, 0.5, 0.9]),
    ]
    monkeypatch.setattr(pages, "runs", lambda: runs)
    own = pages.filled("a\n<!-- results -->old<!-- end -->\nb <!-- results later --> c", "rloo")
    assert own == (
        "a\n<!-- results -->\n\n| run | start | 20 steps | 40 steps |\n|---|---|---|---|\n"
        "| ratio 0, seed 57 | 0.50 |  | 0.76 |\n| ratio 4, seed 83 | 0.25 | 0.50 | 0.75 |\n\n"
        "<!-- end -->\nb <!-- results later --> c"
    )
    assert pages.filled(own, "rloo") == own
    assert list(pages.own_table("dpo"))[2:] == ["| seed 57 | 0.00 | 0.50 | 0.90 |"]
    rows = list(pages.main_table("algorithms"))
    assert "| [`rloo`](../recipes/rloo.md) | 1e-3 | 0.76 |  |  |  |  |" in rows
    assert not any("dpo" in row and "dppo" not in row and "gdpo" not in row for row in rows)
    assert Path(pages.DOCS / "recipes/rloo.md").is_file()
