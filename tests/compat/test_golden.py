"""Files of other systems are read or refused as in tests/data/compat, which `python -m tests.compat.golden` rewrites.

`cases.yaml` has one key or two at a time; each other file has a whole recipe as `roll convert` prints it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from roll.base.schema import leaves, value_at
from roll.loading.load import load_config
from roll.loading.yaml_files import read_tree, referenced
from roll.plan.plan import make_plan
from roll.tools.convert import convert
from tests.compat.golden import answered, cases, converted, golden_file
from tests.configs.samples import LAPTOP, RECIPES, SFT, recipes, write


@pytest.mark.parametrize("case", cases(), ids=lambda case: case["case"])
def test_a_case_has_its_answer(case: dict[str, Any]) -> None:
    assert answered(case) == case


@pytest.mark.parametrize("name", recipes(refused=False))
def test_a_converted_recipe_is_the_same_configuration_and_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY_THAT_IS_NOT_SET", "is set")
    assert converted(name) == golden_file(name).read_text()
    original, again = load_config(RECIPES / f"{name}.yaml"), load_config(golden_file(name))
    assert again == original and again.source.notes == []
    plans = [make_plan(config, LAPTOP).as_dict() for config in (original, again)]
    for plan in plans:
        del plan["warnings"], plan["source"]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("name", recipes(refused=False))
def test_each_key_of_a_recipe_is_read_or_named_in_a_remark(name: str) -> None:
    source, written = load_config(RECIPES / f"{name}.yaml").source, read_tree(RECIPES / f"{name}.yaml", [])
    remarks = " ".join(f"{paths} {message}" for paths, message in source.notes)
    named = {part for path in leaves(source.tree) for part in path.split(".")} | set(re.findall(r"\w+", remarks))
    used = referenced(written) - {"reward_pretrain"}
    given = [path.split(".") for path in leaves(written) if value_at(written, path) not in (None, {})]
    assert [parts for parts in given if parts[-1] not in named and parts[0] not in used | named] == []


def test_references_to_variables_and_times_are_printed_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hidden")
    monkeypatch.setenv("A_NUMBER", "7")
    text = "exp_name: mine-${now:%Y}\ntrack_with: wandb\ntracker_kwargs: {api_key: '${oc.env:A_SECRET}'}\n"
    printed = convert(write(tmp_path, SFT + text))
    assert "mine-${now:%Y}" in printed and "${oc.env:A_SECRET}" in printed and "hidden" not in printed
    printed = convert(write(tmp_path, SFT + "seed: ${oc.env:A_NUMBER}\n"))
    assert load_config(write(tmp_path, printed, "converted.yaml")).seed == 7


def test_a_text_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    file = write(tmp_path, SFT + "exp_name: '1e-6'\n")
    assert load_config(write(tmp_path, convert(file), "converted.yaml")).exp_name == "1e-6"
