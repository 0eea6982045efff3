"""The migration tables and docs/coming_from agree and name keys that exist."""

from __future__ import annotations

import re

import yaml

from roll.base.schema import known_keys, value_at
from roll.compat.names import NAMES, SHORT_NAMES
from roll.compat.recipe import Recipe
from roll.compat.rules import read_rules
from roll.compat.systems.async_trainers import KIND, WEIGHT_RANGE, WEIGHT_SWITCH
from roll.compat.systems.verl import VERL_KEYS, VERL_NAMES
from roll.compat.systems.verl_correction import read_rollout_correction
from roll.compat.translate import MOVED, RENAMED, RULES
from roll.configs.agentic import AgenticConfig
from roll.configs.devices.sglang_options import server_options
from roll.configs.pipeline import DPOConfig, RLVRConfig
from roll.loading.load import PIPELINES
from tests.configs.samples import DPO_KEYS, READ_KEYS
from tests.pages import text_of

COMING_FROM = text_of("coming_from")
ENGINE = "actor_infer.strategy_args.strategy_config."


def rows(head: str = "there") -> list[list[str]]:
    """Cells of every row of the tables whose first heading is `head`, without headings."""
    found: list[list[str]] = []
    inside = False
    previous = ""
    for line in COMING_FROM.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not previous.startswith("|"):
            inside = cells[0] == head
        elif line.startswith("|") and inside and not line.startswith("|---"):
            found.append(cells)
        previous = line
    return found


def test_every_key_of_the_migration_tables_exists() -> None:
    known = {key.path for cls in (RLVRConfig, AgenticConfig, DPOConfig) for key in known_keys(cls)}
    known |= {re.sub(r"^actor_train", "<role>", path) for path in known}
    known |= {f"{ENGINE}{name}" for name in server_options() or ()}
    named = [key for row in rows() for key in re.findall(r"`([^`]+)`", row[1])]
    assert len(named) > 100
    assert [key for key in named if key not in known] == []


def is_read(name: str) -> bool:
    """Whether a key of another framework is known or answered without the data."""
    if name == KIND:
        return True
    keys = [key.path for cls in (RLVRConfig, AgenticConfig) for key in known_keys(cls)]
    own = {"worker_cls", *(path.rpartition(".")[2] for path in keys if not path.startswith("rewards."))}
    others = MOVED.keys() - VERL_KEYS.keys()
    moved = {*RENAMED, *others, *(path.rpartition(".")[2] for path in others), WEIGHT_SWITCH, WEIGHT_RANGE}
    if any(f".{path}".endswith(f".{name}") for path in VERL_KEYS if not path.endswith(tuple(VERL_NAMES))):
        return True
    return name in {*own, *moved, *READ_KEYS, *DPO_KEYS} or any(
        item.matches(path) for item in RULES.rules for path in (name, f"actor_train.{name}")
    )


def reported() -> dict[str, set[str]]:
    """Keys here of every name in the tables that is neither known nor a value or file."""
    pairs: dict[str, set[str]] = {}
    for other, own, _ in rows():
        names = [text.partition(":")[0].lstrip("-").replace("-", "_") for text in re.findall(r"`([^`]+)`", other)]
        names = [name.removeprefix("rewards.<name>.").removeprefix("validation.") for name in names]
        ours = re.findall(r"`([^`]+)`", own)
        for index, name in enumerate(names):
            if not is_read(name) and name not in ("fp16", "mse", "train.py", "train_async.py"):
                pairs[name] = {ours[index]} if len(ours) == len(names) else set(ours)
    return pairs


def test_page_and_tables_agree() -> None:
    assert {name: set(keys) for name, keys in NAMES.items() if name not in SHORT_NAMES} == reported()


def test_every_row_has_three_cells() -> None:
    assert [row for row in rows() if len(row) != 3] == []


def test_every_moved_key_is_on_the_page() -> None:
    shown = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
    moved = {path.rpartition(".")[2] for path in MOVED.keys() - VERL_KEYS.keys()}
    assert moved <= shown
    ends = tuple(f".{name}" for name in shown)
    single = [path for path in VERL_KEYS if ".megatron." not in path and ".val_kwargs." not in path]
    assert len(single) > 50 and [path for path in single if not f".{path}".endswith(ends)] == []
    assert {"num_gpus_per_node", "batch_timeout", "batch_generation_interval"} <= shown & set(RENAMED)


def test_the_defaults_of_the_page_are_those_of_the_code() -> None:
    table = rows("key")
    assert len(table) > 20 and {len(row) for row in table} == {6}
    here = {row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in table}
    assert here == {path: value_at(RLVRConfig(), path) for path in here}


def test_the_rejections_of_the_page_are_those_that_a_file_in_verls_spelling_gets() -> None:
    table = rows("`rollout_rs`, `rollout_rs_threshold`")
    assert len(table) >= 6
    for given, ours in table:
        option, threshold = re.findall(r"`([^`]+)`", given)
        keys = {"rollout_rs": option, "rollout_rs_threshold": yaml.safe_load(threshold)}
        recipe = Recipe({"algorithm": {"rollout_correction": keys}})
        read_rollout_correction(recipe)
        assert not recipe.problems
        assert recipe.get("correction.rejection") == yaml.safe_load(ours.strip("`"))


def test_rules_of_one_line_are_read() -> None:
    text = """
[<role>.] sft
some_key other_key if 1 adam* off: reason of
    two lines: it has a colon
refuse a.*: why
"""
    some, other, refused = read_rules(text)
    assert (some.pattern, other.pattern, refused.pattern) == ("<role>.some_key", "<role>.other_key", "<role>.a.*")
    assert (some.reason, some.pipelines) == ("reason of two lines: it has a colon", ("sft",))
    assert [value for value in (1, 2, "adamw", "sgd", 0, None, True) if some.accepts(value)] == [1, "adamw", 0, None, 1]
    assert some.matches("critic.some_key") and not some.matches("critic.x.some_key") and refused.matches("judge.a.b")
    assert not refused.accepts(1)


def test_no_rule_hides_a_key_that_exists() -> None:
    for name, root in PIPELINES.items():
        paths = [key.path.replace("<name>", "any") for key in known_keys(root)]
        hidden = [
            (path, item.pattern)
            for item in RULES.rules
            for path in paths
            if name in item.pipelines and item.matches(path)
        ]
        assert hidden == []
