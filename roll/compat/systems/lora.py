"""LoRA: the keys of ROLL, verl, TRL and peft as those of `actor_train.model_args`."""

from __future__ import annotations

from typing import Any

from roll.compat.recipe import Recipe
from roll.compat.rules import PLACEHOLDERS
from roll.configs.learning.lora import parse_targets
from roll.models.families.weights import ALL_LINEAR

OURS = "actor_train.model_args"
KEYS = ("lora_target", "lora_rank", "lora_alpha", "lora_dropout")
PLACES = ("", "peft_config.", "lora_config.", "actor_rollout_ref.model.", "actor_rollout_ref.model.lora.")
"""Sections with keys of LoRA; some have the options of adapters alone, under shorter names."""

NAMES = {
    "lora_target": "lora_target",
    "lora_target_modules": "lora_target",
    "target_modules": "lora_target",
    "lora_rank": "lora_rank",
    "lora_r": "lora_rank",
    "rank": "lora_rank",
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "dropout": "lora_dropout",
    "lora_adapter_path": "adapter_name_or_path",
    "adapter_path": "adapter_name_or_path",
}
SHORT = ("rank", "r", "alpha", "dropout", "target_modules", "adapter_path")
"""Names that belong to adapters only in a section of their own."""

SWITCHES = ("use_peft", "use_lora", "enable_lora")
KINDS = ("finetuning_type", "adapter", "peft_type", "tuner_type", "train_type")
"""Keys whose value `lora` asks for adapters."""

MEGATRON_LAYERS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
WITHOUT_EFFECT = {
    "bias": "none",
    "task_type": "CAUSAL_LM",
    "lora_task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "type": "lora",
    "exclude_modules": None,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "lora_modules_to_save": None,
}
"""Other keys of a section of adapters, and the one value of each that is what is done here."""


def read_adapters(recipe: Recipe, from_roll: bool) -> None:
    """Moves keys of LoRA that are on to `actor_train.model_args`; rules drop those of LoRA that is off."""
    for place in PLACES:
        _read_place(recipe, place)
    if from_roll and recipe.has(f"{OURS}.lora_target") and not recipe.get(f"{OURS}.lora_target"):
        for key in KEYS:
            recipe.drop(f"{OURS}.{key}", "there is no LoRA without lora_target")
    for role in PLACEHOLDERS["<role>"]:
        if role not in ("actor_train", "critic"):
            _drop_of_role(recipe, role)


def _read_place(recipe: Recipe, place: str) -> None:
    section = recipe.section(place[:-1]) if place else recipe.tree
    own = place.endswith(("_config.", ".lora."))
    names = {name: ours for name, ours in NAMES.items() if own or name not in SHORT}
    if place == "actor_rollout_ref.model.":
        names["target_modules"] = "lora_target"
    given = {name: ours for name, ours in names.items() if section.get(name) is not None}
    switches = [name for name in SWITCHES if section.get(name) is not None]
    kinds = [name for name in KINDS if str(section.get(name)).lower() == "lora"]
    ranks = [section[name] for name, ours in given.items() if ours == "lora_rank"]
    asks = [*(section[name] for name in switches), *kinds, *ranks]
    if not asks and "lora_target" not in given.values() or not all(asks):
        return
    for name in (*switches, *kinds):
        recipe.take(f"{place}{name}")
    for name, ours in given.items():
        path = f"{place}{name}"
        if ours == "lora_target":
            recipe.put(path, _targets(section[name]))
        recipe.move(path, f"{OURS}.{ours}")
    if own:
        _read_rest(recipe, place)
    if recipe.put_new(f"{OURS}.lora_target", [ALL_LINEAR]):
        first = next(iter((*switches, *kinds, *given)))
        recipe.note(f"{place}{first}", f"is read as {OURS}.lora_target: {ALL_LINEAR}, since no layers are named")


def _targets(value: Any) -> Any:
    """Names of layers, with those of Megatron as the ones of the Hugging Face model."""
    names = parse_targets(value)
    if not isinstance(names, list):
        return names
    return [each for name in names for each in MEGATRON_LAYERS.get(name, [name])]


def _read_rest(recipe: Recipe, place: str) -> None:
    merges = recipe.take(f"{place}merge")
    if merges is True and recipe.put_new("actor_train.lora_update", "merged"):
        recipe.note(f"{place}merge", "is read as actor_train.lora_update: merged")
    elif merges is False:
        recipe.note(f"{place}merge", "has no effect: actor_train.lora_update says how engines get adapters")
    for name, plain in WITHOUT_EFFECT.items():
        value = recipe.take(f"{place}{name}")
        if value and str(value).lower() != str(plain).lower():
            recipe.error(f"{place}{name}", f"{value} is not available; leave it out")


def _drop_of_role(recipe: Recipe, role: str) -> None:
    """Engines get the adapters that are trained, so theirs have to be the same; other roles have none."""
    for key in KEYS:
        path = f"{role}.model_args.{key}"
        value, ours = recipe.get(path), recipe.get(f"{OURS}.{key}")
        targets = [parse_targets(each) for each in (value, ours)] if key == "lora_target" else []
        same = value == ours or any(each in (ALL_LINEAR, [ALL_LINEAR]) for each in targets)
        if targets and all(isinstance(each, list) for each in targets):
            same = same or sorted(targets[0]) == sorted(targets[1])
        if role == "actor_infer" and value and not same:
            recipe.error(path, f"{value} is not {ours}, that of actor_train; leave it out")
        else:
            recipe.drop(path, "engines get the adapters of actor_train")
