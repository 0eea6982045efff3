"""Renames, moves, translates or refuses keys in the spelling of other frameworks, by the tables of this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from roll.base.errors import ConfigError, Problem
from roll.base.schema import SECTION, value_at
from roll.configs.compat import (
    MEGATRON,
    Names,
    Tree,
    UnsupportedKey,
    always,
    async_trainers,
    if_off,
    roll,
    set_at,
    slime,
    trl,
    two_spellings,
    verl,
    vllm,
    without,
)
from roll.configs.compat.async_trainers import WEIGHT_RANGE, WEIGHT_SWITCH
from roll.configs.compat.recipe import Recipe
from roll.configs.compat.verl_correction import read_rollout_correction
from roll.configs.compat.verl_files import place_pools, read_verl_file

EVERYDAY = {
    "<role>.training_args.learning_rate": "lr actor_learning_rate",
    "<role>.training_args.lr_scheduler_type": "scheduler lr_scheduler lr_schedule",
    "<role>.training_args.warmup_steps": "warmup num_warmup_steps lr_warmup",
    "max_steps": "epochs num_epochs n_epochs steps num_steps total_steps train_steps max_iters",
    "rollout_batch_size actor_train.training_args.per_device_train_batch_size": "batch_size bs",
    "<role>.training_args.per_device_train_batch_size": "micro_batch_size micro_train_batch_size",
    "<role>.training_args.gradient_accumulation_steps": "mini_batch_size grad_accum grad_accum_steps",
    "num_return_sequences_in_group": "group_size num_samples n_samples rollout_n num_rollouts",
    "kl_loss_coef init_kl_coef": "kl kl_coef kl_beta kl_coeff",
    "response_length": "max_new_tokens max_tokens max_len max_response_len response_len max_gen_len generate_max_len",
    "prompt_length": "max_prompt_len prompt_len",
    "sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length context_length cutoff_len",
    "actor_train.device_mapping actor_infer.device_mapping": "gpus num_gpus n_gpus ngpus gpu_ids devices num_devices",
    "pretrain <role>.model_args.model_name_or_path": "model model_name_or_path model_path model_id base_model",
    "actor_train.data_args.file_name": "data dataset dataset_name dataset_path data_path datasets train_data"
    " train_file",
    "validation.data_args.file_name": "val_data val_file eval_data eval_dataset eval_file test_file",
    "<role>.model_args.dtype": "fp16 dtype torch_dtype precision mixed_precision",
    "pg_clip_low pg_clip_high": "clip_eps clip_epsilon cliprange clip_range ppo_clip",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping max_norm",
    "rewards.<name>.function": "reward_fn reward_func reward_function",
    "adv_estimator actor_train.pg_variant": "algo algorithm rl_algorithm",
    "actor_train.pg_variant": "loss loss_fn policy_loss",
    "platform": "device accelerator",
    "actor_train.strategy_args.strategy_config": "deepspeed fsdp megatron zero_stage",
    "actor_infer.strategy_args.strategy_config": "vllm sglang",
    "track_with": "logger tracker trackers wandb use_wandb",
    "tracker_kwargs": "wandb_project project project_name",
    "output_dir": "out_dir save_dir save_path",
    "eval_steps": "eval_every eval_freq val_every eval_strategy evaluation_strategy val_before_train",
    "save_steps": "save_every checkpoint_every save_strategy",
    "logging_steps": "log_every log_interval",
    "resume_from_checkpoint": "resume resume_from",
    "reference.model_args.model_name_or_path": "ref_model ref_model_path",
    "kl_loss_type kl_penalty": "kl_estimator",
    "dpo_loss_type": "pref_loss",
    "pipeline": "stage",
    "actor_train.data_args.template": "chat_template",
    "<role>.model_args.attn_implementation": "flash_attn",
    "<role>.use_sequence_packing": "packing",
    "actor_infer.generating_args.temperature": "do_sample",
    "actor_infer.device_mapping": "vllm_num_engines colocate_all_models",
    "actor_train.strategy_args.strategy_config.optimizer_cpu_offload": "offload",
    "actor_train.training_args": "optimizer",
    "save_hf_model": "push_to_hub",
    "async_generation_ratio": "staleness async_level off_policy_steps max_off_policy_steps",
}
"""Key or keys here -> everyday names of them."""

SHORT_NAMES: Names = {
    **dict.fromkeys(("tp_size", "tp"), (f"{MEGATRON}.tensor_model_parallel_size", "actor_infer.num_gpus_per_worker")),
    **dict.fromkeys(("pp_size", "pp"), f"{MEGATRON}.pipeline_model_parallel_size"),
    **{name: tuple(ours.split()) for ours, names in EVERYDAY.items() for name in names.split()},
}
"""Short names used by many frameworks."""

MIGRATION: dict[str, tuple[str, ...]] = {
    name: (ours,) if isinstance(ours, str) else ours
    for table in (verl.NAMES, slime.NAMES, trl.NAMES, SHORT_NAMES)
    for name, ours in table.items()
}
"""Name in another framework -> keys of this project; docs/coming_from.md has the same tables."""

RENAMED_KEYS = roll.RENAMED_KEYS | async_trainers.RENAMED_KEYS
"""Other spelling -> key of this project, at any depth."""

MOVED_KEYS = async_trainers.MOVED_KEYS | verl.MOVED_KEYS | roll.MOVED_KEYS
"""Path in another framework -> path in this project."""

MOVED_VALUES = verl.MOVED_VALUES
"""Path of `MOVED_KEYS` -> its values -> values of the path in this project, where they differ."""

RENAMED_VALUES: dict[str, dict[Any, Any]] = {**verl.RENAMED_VALUES, **vllm.RENAMED_VALUES, **roll.RENAMED_VALUES}
"""Key -> value in another framework -> value of this project with the same meaning."""

AGENT_NAMES = """
agent agent_loop* agent_cls agent_class agent_runner agent_fn agent_func* rollout_fn rollout_func* custom_rollout*
custom_generate_function* multi_turn* workflow workflow_cls workflow_class openai_*
""".split()
"""Names that frameworks have for the loop of an agent, and for the endpoint that it calls."""

NO_ENDPOINT = (
    "agents that call the policy through an OpenAI-compatible endpoint are not available yet; write the loop as a "
    "TextEnv (docs/environments.md)"
)

UNSUPPORTED_KEYS: tuple[UnsupportedKey, ...] = (
    *verl.UNSUPPORTED_KEYS,
    *roll.UNSUPPORTED_KEYS,
    *(UnsupportedKey(f"{section}{name}", if_off, NO_ENDPOINT) for name in AGENT_NAMES for section in ("", "rollout.")),
    *(UnsupportedKey(name, if_off, NO_ENDPOINT, ("agentic",)) for name in ("base_url", "api_base", "api_key")),
    *(UnsupportedKey(name, always, "LoRA is off") for name in ("lora_*", "use_lora", "use_peft", "*.model.lora*")),
)
"""Keys without a counterpart; the first matching pattern applies."""

OWN_NAME = "is read under its name here; keys left out have this project's defaults (docs/coming_from.md)"
"""Remark on all keys of verl that only move, of which a file may have dozens."""

STUDENT_ROLE, PURE_OPD_KIND = "student_train", "pure_opd_pipeline_type"
"""The role that learns from a teacher alone in recipes of ROLL, and the key that says so here."""

SFT_ROLE = "sft_train"
"""The role that is trained in recipes of ROLL for supervised fine-tuning."""

OPAQUE_SECTIONS = ("env_config",)
"""Sections whose keys belong to a class of the user."""

AMBIGUOUS_WORDS = ("n", "name", "path")
"""Last parts of names that mean nothing without the parts before them."""


def migration(path: str) -> tuple[str, ...]:
    """This project's keys for an unknown path of another framework, or for its end; empty if no table has it."""
    for end in _ends(path):
        if end in MIGRATION:
            return MIGRATION[end]
        section = end.rpartition(".")[0]
        if f"{section}.*" in MIGRATION:
            return MIGRATION[f"{section}.*"]
    return ()


def migration_of_last_part(path: str) -> tuple[str, ...]:
    """As `migration`, for a path that leaves out the sections of a name: `lr` for `actor.optim.lr`."""
    for end in _ends(path):
        found = [ours for name, keys in MIGRATION.items() if name.endswith(f".{end}") for ours in keys]
        if found and end not in AMBIGUOUS_WORDS:
            return tuple(dict.fromkeys(found))
    return ()


def _ends(path: str) -> list[str]:
    """The path, and the path without its first part, its first two, and so on."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def normalize_aliases(tree: Mapping[str, Any], source: str, notes: list[Problem]) -> Tree:
    """One file or all overrides in the spelling of this project, so that an override wins in any spelling.

    `notes` receives one remark for every moved key.

    Raises:
        ConfigError: two spellings of one key are given, or a value has no meaning.
    """
    moved = _with_sft_role(async_trainers.read_trainer_type(tree, source, notes), source)
    if moved.get(STUDENT_ROLE) is not None:
        moved = {**moved, PURE_OPD_KIND: STUDENT_ROLE}
    for path, target in MOVED_KEYS.items():
        head, _, key = path.rpartition(".")
        section = value_at(moved, head) if head else moved
        if not isinstance(section, Mapping) or key not in section:
            continue
        if section[key] is None:
            moved = without(moved, path)
            continue
        target_head, _, target_key = target.rpartition(".")
        target_section = value_at(moved, target_head) if target_head else moved
        given = target_section if isinstance(target_section, Mapping) else {}
        if target_key in given and given[target_key] == section[key]:
            notes.append(Problem(path, f"says the same as {target}"))
            moved = without(moved, path)
            continue
        if any(RENAMED_KEYS.get(name, name) == target_key for name in given):
            raise ConfigError([two_spellings(path, target)], source)
        if target_head and not isinstance(target_section or {}, Mapping):
            raise ConfigError([Problem(target_head, f"{target_section!r} is not {SECTION}")], source)
        value, note = _moved_value(path, target, section[key], source)
        if target not in (WEIGHT_SWITCH, WEIGHT_RANGE):  # what they mean is noted by expand_importance_sampling
            notes.append(note)
        moved = set_at(without(moved, path), target, value)
    renamed: Tree = _renamed(moved, source)
    return renamed


def _with_sft_role(tree: Tree, source: str) -> Tree:
    if tree.get(SFT_ROLE) is None:
        return tree
    if RENAMED_KEYS[SFT_ROLE] in tree:
        raise ConfigError([two_spellings(SFT_ROLE, RENAMED_KEYS[SFT_ROLE])], source)
    return {"pipeline": "sft"} | {RENAMED_KEYS.get(key, key) if key == SFT_ROLE else key: tree[key] for key in tree}


def _moved_value(path: str, target: str, value: Any, source: str) -> tuple[Any, Problem]:
    values = MOVED_VALUES.get(path, {})
    if True in values and not isinstance(value, bool):
        raise ConfigError([Problem(path, f"{value!r} is not true or false")], source)
    if not isinstance(value, bool | str) or value not in values:
        return value, Problem(path, OWN_NAME if path in verl.VERL_KEYS else f"is read as {target}")
    return values[value], Problem(path, f"{str(value).lower()} is read as {target}: {values[value]}")


def _renamed(value: Any, source: str, opaque: bool = False) -> Any:
    """A value with the keys of `RENAMED_KEYS` renamed; inside `${...}` those of `MOVED_KEYS` too.

    Of a section of a user's class, which is `opaque`, only the references inside `${...}` are renamed.
    """
    if isinstance(value, Mapping):
        renamed: Tree = {}
        for key, item in value.items():
            name = RENAMED_KEYS[key] if key in RENAMED_KEYS and not opaque else key
            if name != key and item is None:
                continue
            if name in renamed or (name != key and name in value):
                raise ConfigError([two_spellings(key, name)], source)
            renamed[name] = _renamed(item, source, opaque or key in OPAQUE_SECTIONS)
        return renamed
    if isinstance(value, list):
        return [_renamed(item, source, opaque) for item in value]
    if isinstance(value, str) and "${" in value:
        value = re.sub(r"(?<=\$\{)([\w.]+)(?=\})", lambda match: MOVED_KEYS.get(match[1], match[1]), value)
        return re.sub(r"(?<=[{.])(\w+)(?=[.}])", lambda match: RENAMED_KEYS.get(match[1], match[1]), value)
    return value


def translate_values(tree: Tree, path: str = "") -> tuple[Tree, list[Problem]]:
    """The tree with the values of `RENAMED_VALUES` in the spelling of this project, and a remark on each."""
    translated: Tree = {}
    notes: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else key
        translated[key] = value
        if isinstance(value, dict) and key not in OPAQUE_SECTIONS:
            translated[key], inner = translate_values(value, where)
            notes += inner
        elif isinstance(value, str | int) and not isinstance(value, bool) and value in RENAMED_VALUES.get(key, {}):
            translated[key] = RENAMED_VALUES[key][value]
            notes.append(Problem(where, f"{value} is read as {translated[key]}"))
    return translated, notes


@cache
def _unsupported_keys(name: str) -> list[UnsupportedKey]:
    return [item for item in UNSUPPORTED_KEYS if item.matches_name(name)]


def unsupported_key(path: str, pipeline: str) -> UnsupportedKey | None:
    path = path.replace("-", "_").lstrip("_")
    items = _unsupported_keys(path.rpartition(".")[2])
    return next((item for item in items if pipeline in item.pipelines and item.matches(path)), None)


def drop_unsupported_keys(tree: Tree, pipeline: str, path: str = "") -> tuple[Tree, list[Problem], list[Problem]]:
    """The tree without unsupported keys, remarks on the harmless ones, and problems for the others."""
    kept: Tree = {}
    notes: list[Problem] = []
    problems: list[Problem] = []
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        unsupported = unsupported_key(where, pipeline)
        if unsupported is None and isinstance(value, dict) and key not in OPAQUE_SECTIONS:
            inner, inner_notes, inner_problems = drop_unsupported_keys(value, pipeline, where)
            if inner or not value:
                kept[key] = inner
            notes += inner_notes
            problems += inner_problems
        elif unsupported is None:
            kept[key] = value
        elif value is None or unsupported.harmless(value):
            if not unsupported.silent:
                notes.append(Problem(where, f"has no effect: {unsupported.reason}"))
        else:
            shown = "this section" if isinstance(value, dict) else str(value)
            problems.append(Problem(where, f"{shown} is not available: {unsupported.reason}"))
    return kept, notes, problems


def read_systems(recipe: Recipe, pipeline: str, notes: Sequence[Problem]) -> None:
    """Reads the keys of other frameworks that concern several keys here; `notes` are those of `normalize_aliases`."""
    async_trainers.read_buffer_size(recipe, notes)
    place_pools(recipe, pipeline)
    read_rollout_correction(recipe)
    read_verl_file(recipe)


def expand_importance_sampling(recipe: Recipe) -> None:
    """Reads `importance_sampling` and its range as `correction.weights`.

    Without a range the bounds are the defaults of `correction.weights`.
    """
    given = recipe.has(WEIGHT_SWITCH), recipe.has(WEIGHT_RANGE)
    switch, bounds = recipe.take(WEIGHT_SWITCH, False), recipe.take(WEIGHT_RANGE, [0, 1])
    if not any(given):
        return
    numbers = isinstance(bounds, list) and all(type(item) in (int, float) for item in bounds)
    if not isinstance(switch, bool):
        recipe.problems.append(Problem(WEIGHT_SWITCH, f"{switch!r} is not true or false; use true"))
    elif given[0] and "weights" in recipe.section("correction"):
        recipe.problems.append(two_spellings(WEIGHT_SWITCH, "correction.weights"))
    elif not switch and given[1]:
        recipe.problems.append(Problem(WEIGHT_RANGE, f"has no effect without {WEIGHT_SWITCH}: true"))
    elif not switch:
        recipe.note(WEIGHT_SWITCH, "false is the default and does not change correction.weights")
    elif not numbers or len(bounds) != 2:
        message = f"{bounds!r} is not a lower and an upper bound; write [0.5, 2.0]"
        recipe.problems.append(Problem(WEIGHT_RANGE, message))
    else:
        weights: Tree = {"level": "token", "mode": "clamp"}
        if given[1]:
            weights["lower"], weights["upper"] = bounds
        recipe.put("correction.weights", weights)
        shown = ", ".join(f"{key}: {value}" for key, value in weights.items())
        recipe.note(WEIGHT_SWITCH, f"true is read as correction.weights {{{shown}}}")
