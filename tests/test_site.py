"""Pages of the site: the navigation has each once, links lead somewhere, and what a page shows can be done."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path

import latex2mathml.converter
import pytest
import tomli
import yaml

from roll.algorithms.estimators import ADV_ESTIMATORS
from roll.algorithms.policy_loss import POLICY_LOSSES
from roll.base.schema import known_keys
from roll.cli import HELP
from roll.configs.check import check
from roll.loading.load import PIPELINES, load_config
from roll.tools.convert import convert
from scripts.build_site import (
    CELL,
    FENCE,
    PLAIN_FORMULA,
    ROW,
    TABLE_FORMULAS,
    anchors,
    expanded,
    name_rows,
    pages,
    typeset,
    with_breaks,
)
from tests.pages import DOCS, blocks

ROOT = DOCS.parent
HERE = [page for page in sorted(DOCS.rglob("*.md")) if "zh" not in page.relative_to(DOCS).parts]
LINKED = [*HERE, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").rglob("*.md"))]

LONG = ("metrics.md", "other_spellings.md", "configuration/", "algorithms/results.md", "algorithms/advantages.md")
"""Pages with generated tables."""
LOG = "gpu_checks.md"

LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^    (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(roll|make|python -m|scripts/\S+) +(\S+)", re.MULTILINE)
PLAIN = re.compile(
    r"\w\^|\w_\{?\w|[\w)] [-+*/=] [\w(]|\\\||\b(pi|mu|tau|beta|gamma|delta)\b|\b(log|exp|sg|clip|norm)\b ?[(\[]"
)
"""What a formula has that is not typeset."""
OTHER_SYSTEMS = ("actor_rollout_ref:", "worker_cls:", "num_gpus_per_node:")
"""What blocks of YAML with keys of other systems have."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_navigation_has_every_page_once() -> None:
    items = tomli.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    listed = Counter(page for item in pages(items) for page in expanded(item))
    there = {str(page.relative_to(DOCS)) for page in HERE}
    assert listed.keys() == there, "zensical.toml: nav has another set of pages than docs/"
    assert listed.most_common(1)[0][1] == 1


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for address in LINK.findall(FENCE.sub("", page.read_text())):
        if address.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = address.partition("#")
        target = normpath(page.parent / path) if path else str(page)
        if not Path(target).exists() or (anchor and anchor not in anchors(str(Path(target).relative_to(ROOT)))):
            broken.append(address)
    assert broken == []


@pytest.mark.parametrize("page", HERE, ids=name_of)
def test_a_page_has_at_most_900_words(page: Path) -> None:
    name = str(page.relative_to(DOCS))
    text = re.sub(r"^    .*$", "", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    assert name.startswith(LONG) or name == LOG or len(text.split()) <= 900


@pytest.mark.parametrize("page", [page for page in HERE if "```python" in page.read_text()], ids=name_of)
def test_python_on_a_page_compiles(page: Path) -> None:
    for code in blocks(page.read_text(), "python"):
        ast.parse(code)


KNOWN = {re.sub(r"<\w+>", "*", key.path) for root in PIPELINES.values() for key in known_keys(root)}
SECTIONS = {path[: match.start()] for path in KNOWN for match in re.finditer(r"\.", path)} | KNOWN


def keys_of(node: object, path: str = "") -> Iterator[str]:
    """Paths of the keys of a mapping that the schema lists; what a free section has is its own."""
    for key, value in node.items() if isinstance(node, dict) else ():
        inner = f"{path}.{key}".removeprefix(".")
        generic = re.sub(r"^(rewards|custom_envs|\w+\.rejections)\.[^.]+", r"\1.*", inner)
        yield generic
        if generic not in KNOWN:
            yield from keys_of(value, inner)


@pytest.mark.parametrize("page", [page for page in HERE if "```yaml" in page.read_text()], ids=name_of)
def test_yaml_on_a_page_has_keys_that_exist(page: Path) -> None:
    unknown = []
    for text in blocks(page.read_text(), "yaml"):
        tree = yaml.safe_load(text)
        if any(word in text for word in OTHER_SYSTEMS):
            continue
        entry = isinstance(tree, dict) and tree.keys() <= {"env_type", "env_config"}
        found = keys_of({"custom_envs": {"Mine": tree}} if entry else tree)
        unknown += [key for key in found if key not in SECTIONS and key != "defaults"]
    assert unknown == []


def test_commands_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(page, *found) for page in HERE for found in COMMAND.findall(page.read_text())]
    assert len(named) > 50
    for page, command, argument in named:
        if command == "roll":
            assert argument in (*HELP, "COMMAND", "--version", "--help"), (page, argument)
        elif command == "make":
            assert argument in targets, (page, argument)
        elif command == "python -m":
            module = ROOT / argument.replace(".", "/")
            own = argument.partition(".")[0] in ("roll", "examples", "benchmarks", "scripts")
            assert not own or module.is_dir() or module.with_suffix(".py").exists(), (page, argument)
        else:
            assert (ROOT / command).exists(), (page, command)


def test_every_loss_and_estimator_has_a_formula_that_can_be_typeset() -> None:
    text = (DOCS / "algorithms" / "formulas.md").read_text()
    assert re.findall(r"^### `(\w+)`", text, re.MULTILINE) == [*POLICY_LOSSES, *ADV_ESTIMATORS]
    formulas = blocks(text, "math")
    assert len(formulas) > len(POLICY_LOSSES) + len(ADV_ESTIMATORS)
    for formula in formulas:
        assert "\\" not in re.sub(r"<[^>]+>", "", latex2mathml.converter.convert(formula.strip())), formula


@pytest.mark.parametrize("folder", [DOCS / "algorithms", DOCS / "zh" / "algorithms"], ids=["English", "Chinese"])
@pytest.mark.parametrize(
    "page", ["policy_loss", "advantages", "aggregation", "teacher", "correction", "preferences", "rounding"]
)
def test_no_formula_of_a_table_is_plain(page: str, folder: Path) -> None:
    rows = ROW.findall((folder / f"{page}.md").read_text())
    assert "<math" in "".join(map(typeset, rows))
    plain = [row for row in rows if PLAIN.search(PLAIN_FORMULA.sub("", row))]
    assert plain == [], "scripts/site/formulas.toml has no LaTeX for a formula of these rows"


def test_each_formula_for_tables_is_in_one_and_can_be_typeset() -> None:
    rows = [row for page in DOCS.rglob("*.md") for row in ROW.findall(page.read_text())]
    used = {match[1] for row in rows for match in PLAIN_FORMULA.finditer(row)}
    assert TABLE_FORMULAS.keys() - used == set()
    for latex in TABLE_FORMULAS.values():
        assert "\\" not in latex2mathml.converter.convert(latex), latex


def test_code_in_a_table_may_break_behind_marks_of_names() -> None:
    row = "<td><code>rollout/dump_dir</code> <code>ab.py: 3.0e-4</code></td><p><code>a_b</code>"
    broken = "<td><code>rollout/<wbr>dump_<wbr>dir</code> <code>ab.py: 3.0e-4</code></td><p><code>a_b</code>"
    assert CELL.sub(with_breaks, row) == broken


def test_a_row_of_a_key_has_an_anchor_and_is_a_section_of_the_search(tmp_path: Path) -> None:
    (tmp_path / "configuration" / "policies").mkdir(parents=True)
    file = tmp_path / "configuration" / "policies" / "index.html"
    rest = "\n<td>a number</td>\n"
    file.write_text(f"<tr>\n<td><code>policies.&lt;name&gt;.lora_rank</code></td>{rest}</tr>")
    page = {"location": "configuration/policies/", "level": 1, "title": "policies", "path": ["Configuration"]}
    (tmp_path / "search.json").write_text(json.dumps({"items": [page]}))
    name_rows(tmp_path)
    assert file.read_text().startswith('<tr id="policies.name.lora_rank">\n<td><code>')
    row, last = json.loads((tmp_path / "search.json").read_text())["items"]
    assert last == page
    assert (row["location"], row["text"]) == ("configuration/policies/#policies.name.lora_rank", rest)
    assert row["title"] == "<code>policies.&lt;name&gt;.lora_rank</code>"


@pytest.mark.parametrize("system", ["verl", "roll"])
def test_the_whole_file_of_another_framework_is_converted_as_the_page_says(system: str, tmp_path: Path) -> None:
    there, here = blocks((DOCS / "coming_from" / f"{system}.md").read_text(), "yaml")
    file = tmp_path / "their_run.yaml"
    file.write_text(there)
    assert yaml.safe_load(convert(file)) == yaml.safe_load(here)


@pytest.mark.parametrize("system", ["verl", "roll", "slime", "trl"])
def test_the_whole_file_of_a_page_is_accepted(system: str, tmp_path: Path) -> None:
    file = tmp_path / "my_run.yaml"
    file.write_text(blocks((DOCS / "coming_from" / f"{system}.md").read_text(), "yaml")[-1])
    assert check(load_config(file, ["platform=cuda"])).errors == []


def test_quoted_findings_are_those_of_the_report() -> None:
    words = json.loads((ROOT / "roll" / "report" / "static" / "words.json").read_text())
    findings = [text[0] for name, text in words.items() if name.startswith("f_")]
    quoted = re.findall(r"^\| \"(.*?)\"", (DOCS / "does_not_learn.md").read_text(), re.MULTILINE)
    assert len(quoted) >= 8
    assert [quote for quote in quoted if not any(quote in finding for finding in findings)] == []
