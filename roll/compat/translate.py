"""The door: a tree with keys of other systems becomes one with the keys of this project, with remarks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from roll.base.errors import ConfigError, Problem
from roll.base.schema import SECTION, Tree, and_above, leaves, value_at
from roll.compat.recipe import Recipe, shown
from roll.compat.rules import USER_SECTIONS, RuleBook, Table, read_rules, translate_values
from roll.compat.systems.async_trainers import (
    ASYNC,
    WEIGHT_RANGE,
    WEIGHT_SWITCH,
    read_buffer_size,
    read_importance_sampling,
    read_trainer_type,
)
from roll.compat.systems.environments import read_tools
from roll.compat.systems.fsdp import read_fsdp
from roll.compat.systems.lora import read_adapters
from roll.compat.systems.roll import ROLL
from roll.compat.systems.roll_recipes import (
    PURE_OPD_KIND,
    STUDENT_ROLE,
    drop_nulls,
    is_roll_recipe,
    read_pairs,
    read_roll_keys,
    read_roll_recipe,
)
from roll.compat.systems.verl import VERL, VERL_KEYS
from roll.compat.systems.verl_correction import read_rollout_correction
from roll.compat.systems.verl_files import place_pools, read_verl_file
from roll.compat.systems.vllm import VLLM, read_engine

ENDPOINT = """an agent that calls an OpenAI-compatible endpoint is named in custom_envs.<name>.agent, or a program in
    custom_envs.<name>.command (docs/agents.md)"""

AGENTS = f"""agent agent_loop* agent_cls agent_class agent_runner agent_fn agent_func* rollout_fn rollout_func*
    custom_rollout* custom_generate_function* multi_turn* workflow workflow_cls workflow_class openai_* if off:
    {ENDPOINT}"""
"""Names that frameworks have for the loop of an agent, and for the endpoint that it calls."""

COMMON = Table(
    rules=read_rules(f"""
[]
{AGENTS}
[rollout.]
{AGENTS}
[] agentic
base_url api_base api_key if off: {ENDPOINT}
[]
lora_* use_lora use_peft enable_lora peft_config *.model.lora* *.model.target_modules: LoRA is off
""")
)

TABLES = (ASYNC, VERL, VLLM, ROLL, COMMON)

RENAMED = {name: ours for table in TABLES for name, ours in table.rename.items()}
MOVED = {path: ours for table in TABLES for path, ours in table.move.items()}
VALUES = {key: values for table in TABLES for key, values in table.values.items()}
RULES = RuleBook(rule for table in TABLES for rule in table.rules)

SPELLINGS = {path for path in (*RENAMED, *MOVED, WEIGHT_SWITCH, WEIGHT_RANGE) if "." not in path}
"""Top-level keys that take effect under another name; a value may refer to them too."""

OWN_NAME = "is read under its name here; keys left out have this project's defaults (docs/coming_from.md)"
"""Remark on all keys of verl that only move, of which a file may have dozens."""

TAKEN = "is the default, or is read with another key"
"""Remark on a key that was taken without any other."""

SFT_ROLE = "sft_train"
"""The role that is trained in recipes of ROLL for supervised fine-tuning."""


class Translated(NamedTuple):
    """A tree in the spelling of this project, remarks on what was changed, and what cannot be read."""

    tree: Tree
    notes: list[Problem]
    problems: list[Problem]


def translate(
    tree: Tree, pipeline: str, root: type, notes: Sequence[Problem] = (), overridden: Collection[str] = ()
) -> Translated:
    """The keys and values of other systems in a tree without `${...}` as those of this project.

    Args:
        tree: all files and overrides, after `respell`.
        pipeline: of the run.
        root: dataclass of the whole configuration.
        notes: remarks of `respell`.
        overridden: paths whose values come from the command line, which win.
    """
    given, recipe = tree, Recipe(tree, overridden)
    read_buffer_size(recipe, notes)
    place_pools(recipe, pipeline)
    read_rollout_correction(recipe)
    read_verl_file(recipe)
    from_roll = is_roll_recipe(recipe)
    read_adapters(recipe, from_roll)
    if from_roll:
        drop_nulls(recipe, pipeline, RULES, root)
    read_engine(recipe)
    read_fsdp(recipe)
    read_roll_keys(recipe)
    read_tools(recipe)
    if pipeline == "dpo":
        read_pairs(recipe)
    if from_roll:
        read_roll_recipe(recipe, pipeline)
    read_importance_sampling(recipe)
    tree, dropped, refused = RULES.apply(recipe.tree, pipeline)
    tree, values = translate_values(tree, VALUES)
    remarks = [*recipe.notes, *dropped, *values]
    return Translated(tree, remarks + _unsaid(given, tree, [*notes, *remarks]), recipe.problems + refused)


def _unsaid(given: Tree, tree: Tree, notes: Sequence[Problem]) -> list[Problem]:
    """A remark on each key that was taken and that no remark names."""
    kept = {*leaves(tree), *(note.path for note in notes)}
    above = {each for path in kept for each in and_above(path)}
    said = set(re.findall(r"\w+", " ".join(note.message for note in notes)))
    gone = [path for path in leaves(given) if value_at(given, path) not in (None, {})]
    return [
        Problem(path, TAKEN)
        for path in gone
        if path.rpartition(".")[2] not in said and path not in above and kept.isdisjoint(and_above(path))
    ]


def respell(tree: Mapping[str, Any], source: str, notes: list[Problem]) -> Tree:
    """One file or all overrides with the names of this project; `notes` receives one remark for every moved key.

    Raises:
        ConfigError: two spellings of one key are given, or a value has no meaning.
    """
    layer = Recipe(tree)
    read_trainer_type(layer)
    if layer.get(SFT_ROLE) is not None and RENAMED[SFT_ROLE] not in layer.tree:
        named = {RENAMED[SFT_ROLE] if key == SFT_ROLE else key: value for key, value in layer.tree.items()}
        layer.tree = {"pipeline": "sft"} | named
    if layer.get(STUDENT_ROLE) is not None:
        layer.put(PURE_OPD_KIND, STUDENT_ROLE)
    for path, target in MOVED.items():
        if layer.has(path):
            _move(layer, path, target)
    renamed: Tree = _renamed(layer, layer.tree)
    if layer.problems:
        raise ConfigError(layer.problems, source)
    notes += layer.notes
    return renamed


def _move(layer: Recipe, path: str, target: str) -> None:
    value = layer.take(path)
    if value is None:
        return
    head, _, key = target.rpartition(".")
    around = layer.get(head) if head else layer.tree
    given = around if isinstance(around, Mapping) else {}
    values = VALUES.get(path, {})
    if key in given and given[key] == value:
        layer.note(path, f"says the same as {target}")
    elif any(RENAMED.get(name, name) == key for name in given):
        layer.two_spellings(path, target)
    elif head and not isinstance(around or {}, Mapping):
        layer.error(head, f"{around!r} is not {SECTION}")
    elif True in values and not isinstance(value, bool):
        layer.refuse(path, value, "true or false")
    elif isinstance(value, bool | str) and value in values:
        layer.put(target, values[value])
        layer.note(path, f"{shown(value)} is read as {target}: {values[value]}")
    else:
        layer.put(target, value)
        if target not in (WEIGHT_SWITCH, WEIGHT_RANGE):  # `read_importance_sampling` says what they mean
            layer.note(path, OWN_NAME if path in VERL_KEYS else f"is read as {target}")


def _renamed(layer: Recipe, value: Any, opaque: bool = False) -> Any:
    """A value with the keys of `RENAMED` renamed; inside `${...}` those of `MOVED` too.

    Of a section of a user's class, which is `opaque`, only the references inside `${...}` are renamed.
    """
    if isinstance(value, Mapping):
        renamed: Tree = {}
        for key, item in value.items():
            name = RENAMED[key] if key in RENAMED and not opaque else key
            if name != key and item is None:
                continue
            if name in renamed or (name != key and name in value):
                layer.two_spellings(key, name)
            renamed[name] = _renamed(layer, item, opaque or key in USER_SECTIONS)
        return renamed
    if isinstance(value, list):
        return [_renamed(layer, item, opaque) for item in value]
    if isinstance(value, str) and "${" in value:
        value = re.sub(r"(?<=\$\{)([\w.]+)(?=\})", lambda match: MOVED.get(match[1], match[1]), value)
        return re.sub(r"(?<=[{.])(\w+)(?=[.}])", lambda match: RENAMED.get(match[1], match[1]), value)
    return value
