"""Answers to files of other systems; `python -m tests.compat.golden` writes them to tests/data/compat.

A case is a base file, text that is appended to it, and overrides. Its answer is what they change in the translated
base:
the keys that they set and remove, and the remarks that they add; or the problems for which they are refused.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from roll.base.errors import ConfigError
from roll.base.schema import leaves, value_at
from roll.loading.load import load_config
from roll.tools.convert import convert
from tests.configs.samples import AGENTIC, DATA, MODEL, RECIPES, RLVR, SFT, recipes

CASES = DATA / "compat" / "cases.yaml"

SAMPLES = {
    "": "",
    "rlvr": RLVR,
    "sft": SFT,
    "agentic": AGENTIC,
    "rlvr without devices": RLVR.replace("  device_mapping: 0-15\n", "").replace(
        "actor_infer:\n  device_mapping: 16-23\n", ""
    ),
    "rlvr without batch": RLVR.replace("rollout_batch_size: 64\nnum_return_sequences_in_group: 8\n", "").replace(
        "    gradient_accumulation_steps: 64\n", "    warmup_steps: 1\n"
    ),
}
"""Bases beside the recipes of tests/data/recipes."""

Answer = dict[str, Any]


def answer(base: str, text: str = "", overrides: tuple[str, ...] = ()) -> Answer:
    """What a case changes in its base, or why it is refused."""
    try:
        tree, remarks = translated(base, text, overrides)
    except ConfigError as error:
        return {"refused": sorted(str(problem).replace(MODEL, "MODEL") for problem in error.problems)}
    if base in SAMPLES:
        written = yaml.safe_load(SAMPLES[base]) or {}
        before, known = {path: value_at(written, path) for path in leaves(written)}, frozenset[str]()
    else:
        before, known = translated(base, "", ())
    changed = {path: value for path, value in tree.items() if path not in before or before[path] != value}
    removed = [path for path in before if path not in tree]
    found = {"sets": changed, "removes": removed, "remarks": sorted(remarks - known)}
    return {name: part for name, part in found.items() if part}


@cache
def translated(base: str, text: str, overrides: tuple[str, ...]) -> tuple[dict[str, Any], frozenset[str]]:
    """The keys and values of a case in the spelling of this project, and its remarks, one for each key."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        own = SAMPLES[base] if base in SAMPLES else f"defaults: [{RECIPES / base}.yaml]\n"
        file.write_text(own + text)
        source = load_config(file, overrides).source
    paths = list(leaves(source.tree))
    remarks = (f"{path}: {message}" for each, message in source.notes for path in each.split(", "))
    return {path: value_at(source.tree, path) for path in paths}, frozenset(remarks)


def cases() -> list[dict[str, Any]]:
    return yaml.safe_load(CASES.read_text()) or []


def answered(case: dict[str, Any]) -> dict[str, Any]:
    """The case with the answer of today's code."""
    asked = {name: case[name] for name in ("case", "base", "text", "overrides") if name in case}
    return asked | answer(case["base"], case.get("text", ""), tuple(case.get("overrides", ())))


def golden_file(recipe: str) -> Path:
    return DATA / "compat" / f"{recipe}.yaml"


def converted(recipe: str) -> str:
    """What `roll convert` prints of a recipe, without the line that names the file."""
    return convert(RECIPES / f"{recipe}.yaml").partition("\n")[2]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, and lists of numbers, as one would."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=all(isinstance(item, int | float) for item in items)
    ),
)


def write_cases(found: list[dict[str, Any]]) -> None:
    CASES.write_text(yaml.dump(found, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


if __name__ == "__main__":
    for name in recipes(refused=False):
        golden_file(name).write_text(converted(name))
    write_cases([answered(case) for case in cases()])
