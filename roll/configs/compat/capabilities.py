"""What recipes of other frameworks may need that this project does not have, found before any key is read.

Without this a recipe for, say, images would be answered with twenty unknown keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from roll.base.errors import Problem
from roll.configs.compat.recipe import ABSENT, Recipe
from roll.configs.compat.roll import freezes_text

MOE_NAME = re.compile(r"\d+B-?A\d+(\.\d+)?B|mixtral|deepseek-v[23]|moe", re.IGNORECASE)
"""Names of mixtures of experts, such as Qwen3-30B-A3B."""

LINEAR_ATTENTION_NAME = re.compile(r"qwen3\.5|qwen3-?next|qwen3-coder-next", re.IGNORECASE)
"""Names of models most of whose layers have linear attention, such as Qwen3.5-27B."""

VISION_NAME = re.compile(r"[-_]vl\b|[-_]vl[-_]|vision|omni", re.IGNORECASE)
"""Names of models and templates for images, such as Qwen2.5-VL-7B-Instruct."""

MEGATRON_ROLES = ("actor_train", "sft_train", "reference", "student", "student_train", "teacher")

TRAINED_ROLES = ("actor_train", "sft_train", "student", "student_train")

Found = Iterator[tuple[str, Any]]
"""Paths and values that need a capability."""


def missing_capabilities(tree: Mapping[str, Any]) -> Problem | None:
    """One problem that names everything a recipe needs and this project lacks; None if there is nothing.

    It comes before `${...}` is replaced, because that may fail for what is missing.
    """
    recipe = Recipe(tree)
    lacking = []
    for name, find in CAPABILITIES.items():
        found = next(find(recipe), None)
        if found is not None:
            path, value = found
            shown = f" {value}" if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
            lacking.append(f"{name} ({path}{shown})")
    if not lacking:
        return None
    return Problem("", f"this recipe needs what is not available here: {', '.join(lacking)}")


def _given(*paths: str, accepts: Callable[[Any], bool] = bool) -> Callable[[Recipe], Found]:
    def find(recipe: Recipe) -> Found:
        for path in paths:
            value = recipe.get(path, ABSENT)
            if value is not ABSENT and accepts(value):
                yield path, value

    return find


def _of_roles(
    key: str, accepts: Callable[[Any], bool], roles: tuple[str, ...] = MEGATRON_ROLES
) -> Callable[..., Found]:
    return _given(*(f"{role}.{key}" for role in roles), accepts=accepts)


def _option(name: str, accepts: Callable[[Any], bool]) -> Callable[[Recipe], Found]:
    return _of_roles(f"strategy_args.strategy_config.{name}", accepts)


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and any(fnmatchcase(value, name) for name in names)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _named(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(pattern.search(value.rpartition("/")[2]))


def _any(*finders: Callable[[Recipe], Found]) -> Callable[[Recipe], Found]:
    def find(recipe: Recipe) -> Found:
        for finder in finders:
            yield from finder(recipe)

    return find


def _classes(key: str, *names: str) -> Callable[[Recipe], Found]:
    """Finds the class that a key of the file, or of one of its environments, names."""

    def find(recipe: Recipe) -> Found:
        sections = ["", *(f"custom_envs.{tag}." for tag in recipe.section("custom_envs"))]
        for section in sections:
            value = recipe.get(f"{section}{key}")
            name = value.rpartition(".")[2] if isinstance(value, str) and "${" not in value else ""
            if name and any(fnmatchcase(name, pattern) for pattern in names):
                yield f"{section}{key}", name

    return find


def _rollout_only(recipe: Recipe) -> Found:
    if recipe.has("actor_infer") and not recipe.has("actor_train") and recipe.has("hydra"):
        yield "actor_train", None


def _teachers(recipe: Recipe) -> Found:
    for role in ("teacher", "reference"):
        given = recipe.get(role)
        if isinstance(given, dict):
            named = [name for name, value in given.items() if isinstance(value, dict) and "model_args" in value]
            yield from ((f"{role}.{name}", None) for name in named)
            if given.get("tag_included"):
                yield f"{role}.tag_included", None


def _trained_by(*names: str) -> Callable[[Recipe], Found]:
    """Finds the engine that trains a role, or a critic that is used: without `adv_estimator` one that is given is."""
    path, accepts = "strategy_args.strategy_name", _is(*names)

    def of_critic(recipe: Recipe) -> Found:
        if recipe.get("adv_estimator", "gae") == "gae":
            yield from _given(f"critic.{path}", accepts=accepts)(recipe)

    return _any(_of_roles(path, accepts), of_critic)


def _model(name: re.Pattern[str]) -> Callable[[Recipe], Found]:
    accepts = _named(name)
    return _any(
        _given("pretrain", "student_pretrain", accepts=accepts), _of_roles("model_args.model_name_or_path", accepts)
    )


LORA_KEYS = ("finetuning_type", "adapter", "peft_type", "tuner_type", "train_type")
"""Keys whose value may be LoRA."""

LORA_NAME = re.compile(r"(use_|enable_)?(q?lora|peft)(_\w+)?", re.IGNORECASE)
"""Keys that turn LoRA on in any framework, or set its size."""


def _adapters(recipe: Recipe) -> Found:
    """Finds keys of LoRA that are on; beside a target or rank that is off the others have no effect."""

    def walk(section: Mapping[str, Any], path: str) -> Found:
        off = any(not section.get(name, True) for name in ("lora_target", "lora_rank"))
        for name, value in section.items():
            if LORA_NAME.fullmatch(str(name)):
                size = value.get("rank", value.get("r", True)) if isinstance(value, Mapping) else value
                if size and not off:
                    yield f"{path}{name}", value
            elif isinstance(value, Mapping) and name != "env_config":
                yield from walk(value, f"{path}{name}.")

    return walk(recipe.tree, "")


CAPABILITIES: dict[str, Callable[[Recipe], Found]] = {
    "distillation from stored responses": _given("student", "kd_objective"),
    "distillation from the model itself": _given("opsd_mode"),
    "several teachers, or a teacher of some tags": _teachers,
    "rollouts without training": _rollout_only,
    "DeepSpeed training": _trained_by("deepspeed_train*"),
    "FSDP training": _trained_by("fsdp*_train", "hf_train"),
    "images": _any(
        _model(VISION_NAME),
        _of_roles("data_args.template", _named(VISION_NAME)),
        _classes("env_manager_cls", "VL*"),
    ),
    "diffusion models": _of_roles("model_args.model_type", _is("diffusion*")),
    "mixtures of experts": _any(
        _option("expert_model_parallel_size", _above_one),
        _model(MOE_NAME),
    ),
    "linear attention": _model(LINEAR_ATTENTION_NAME),
    "LoRA": _any(
        _of_roles("model_args.adapter_name_or_path", bool), _adapters, _given(*LORA_KEYS, accepts=_is("*lora*"))
    ),
    "quantised training": _given(
        "load_in_4bit", "load_in_8bit", "quantization_bit", "bnb_config", "quantization_config"
    ),
    "frozen parts of a model": _of_roles("model_args.freeze_module_prefix", freezes_text, TRAINED_ROLES),
    "training in fp8": _option("fp8", bool),
    "context parallelism": _any(
        _option("context_parallel_size", _above_one), _of_roles("model_args.ulysses_size", _above_one)
    ),
    "multi-token prediction": _of_roles("mtp_training_mode", _is("standalone", "joint")),
    "pipeline parallelism of an engine": _given(
        "actor_infer.strategy_args.strategy_config.pipeline_parallel_size",
        "actor_infer.strategy_args.strategy_config.pp_size",
        accepts=_above_one,
    ),
    "quantised engines": _given(
        "actor_infer.strategy_args.strategy_config.quantization",
        "actor_infer.strategy_args.strategy_config.online_quantization",
    ),
    "speculative decoding": _given(
        "actor_infer.strategy_args.strategy_config.speculative_algorithm",
        "actor_infer.strategy_args.strategy_config.speculative_draft_model_path",
        "actor_infer.strategy_args.strategy_config.speculative_config",
    ),
    "agents that call the policy through an OpenAI-compatible endpoint": _any(
        _classes("env_manager_cls", "*Proxy*", "*AgentRunner*"), _classes("agent_runner_cls", "*")
    ),
    "agents that keep their own messages": _classes("env_manager_cls", "AgentNative*", "*Sandbox*"),
}
"""Capability -> where a recipe shows that it needs it."""
