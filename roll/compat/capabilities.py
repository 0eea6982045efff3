"""What recipes of other frameworks may need that this project does not have, found before any key is read.

Without this a recipe for, say, images would be answered with twenty unknown keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from roll.base.errors import Problem
from roll.compat.recipe import ABSENT, SGLANG, Recipe
from roll.compat.rules import Test

MEGATRON_ROLES = "actor_train sft_train reference student student_train teacher"

Find = Callable[[Recipe], Iterator[tuple[str, Any]]]
"""Gives the paths and values that need a capability."""


def missing_capabilities(tree: Mapping[str, Any]) -> Problem | None:
    """One problem that names everything a recipe needs and this project lacks; None if there is nothing.

    It comes before `${...}` is replaced, because that may fail for what is missing.
    """
    recipe = Recipe(tree)
    lacking = []
    for name, finders in CAPABILITIES.items():
        found = next((found for find in finders for found in find(recipe)), None)
        if found is not None:
            path, value = found
            shown = f" {value}" if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
            lacking.append(f"{name} ({path}{shown})")
    if not lacking:
        return None
    return Problem("", f"this recipe needs what is not available here: {', '.join(lacking)}")


def _given(paths: str, accepts: Test = bool) -> Find:
    def find(recipe: Recipe) -> Iterator[tuple[str, Any]]:
        for path in paths.split():
            value = recipe.get(path, ABSENT)
            if value is not ABSENT and accepts(value):
                yield path, value

    return find


def _of_roles(key: str, accepts: Test = bool) -> Find:
    return _given(" ".join(f"{role}.{key}" for role in MEGATRON_ROLES.split()), accepts)


def _is(*names: str) -> Test:
    return lambda value: isinstance(value, str) and any(fnmatchcase(value, name) for name in names)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _named(pattern: str) -> Test:
    """Tests the name of a model or template, without the folder or organisation before it."""
    found = re.compile(pattern, re.IGNORECASE)
    return lambda value: isinstance(value, str) and bool(found.search(value.rpartition("/")[2]))


def _models(accepts: Test) -> tuple[Find, ...]:
    return _given("pretrain student_pretrain", accepts), _of_roles("model_args.model_name_or_path", accepts)


def _classes(key: str, *names: str) -> Find:
    """Finds the class that a key of the file, or of one of its environments, names."""

    def find(recipe: Recipe) -> Iterator[tuple[str, Any]]:
        sections = ["", *(f"custom_envs.{tag}." for tag in recipe.section("custom_envs"))]
        for section in sections:
            value = recipe.get(f"{section}{key}")
            name = value.rpartition(".")[2] if isinstance(value, str) and "${" not in value else ""
            if name and any(fnmatchcase(name, pattern) for pattern in names):
                yield f"{section}{key}", name

    return find


def _rollout_only(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    if recipe.has("actor_infer") and not recipe.has("actor_train") and recipe.has("hydra"):
        yield "actor_train", None


def _teachers(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for role in ("teacher", "reference"):
        given = recipe.section(role)
        named = [name for name, value in given.items() if isinstance(value, dict) and "model_args" in value]
        yield from ((f"{role}.{name}", None) for name in named)
        if given.get("tag_included"):
            yield f"{role}.tag_included", None


def _trained_by(*names: str) -> tuple[Find, ...]:
    """Finds the engine that trains a role, or a critic that is used: without `adv_estimator` one that is given is."""
    path, accepts = "strategy_args.strategy_name", _is(*names)

    def of_critic(recipe: Recipe) -> Iterator[tuple[str, Any]]:
        if recipe.get("adv_estimator", "gae") == "gae":
            yield from _given(f"critic.{path}", accepts)(recipe)

    return _of_roles(path, accepts), of_critic


OPTIONS = "strategy_args.strategy_config"
VISION = _named(r"[-_]vl\b|[-_]vl[-_]|vision|omni")

CAPABILITIES: dict[str, tuple[Find, ...]] = {
    "distillation from stored responses": (_given("student kd_objective"),),
    "distillation from the model itself": (_given("opsd_mode"),),
    "several teachers, or a teacher of some tags": (_teachers,),
    "rollouts without training": (_rollout_only,),
    "DeepSpeed training": _trained_by("deepspeed_train*"),
    "training by transformers": _trained_by("hf_train"),
    "images": (*_models(VISION), _of_roles("data_args.template", VISION), _classes("env_manager_cls", "VL*")),
    "diffusion models": (_of_roles("model_args.model_type", _is("diffusion*")),),
    "multi-head latent attention": _models(_named(r"deepseek-v[23]|moonlight|kimi-k2")),
    "experts with biases": _models(_named(r"gpt-oss")),
    "linear attention": _models(_named(r"qwen3\.5|qwen3-?next|qwen3-coder-next")),
    "quantised training": (
        _given("load_in_4bit load_in_8bit quantization_bit bnb_config quantization_config"),
        _given("finetuning_type adapter peft_type tuner_type train_type", _is("*qlora*")),
    ),
    "adapters other than plain LoRA": (
        _given("use_dora use_rslora peft_config.use_dora peft_config.use_rslora peft_config.rank_pattern"),
        _given("finetuning_type adapter tuner_type train_type", _is("*dora*", "*loha*", "*lokr*", "vera")),
    ),
    "training in fp8": (_of_roles(f"{OPTIONS}.fp8"),),
    "multi-token prediction": (_of_roles("mtp_training_mode", _is("standalone", "joint")),),
    "pipeline parallelism of an engine": (_given(f"{SGLANG}.pipeline_parallel_size {SGLANG}.pp_size", _above_one),),
    "quantised engines": (_given(f"{SGLANG}.quantization {SGLANG}.online_quantization"),),
    "speculative decoding": (
        _given(" ".join(f"{SGLANG}.speculative_{name}" for name in ("algorithm", "draft_model_path", "config"))),
    ),
    "agents in a sandbox": (_classes("agent_runner_cls", "Push*", "Pull*", "Rock*", "Sandbox*"),),
    "agents that keep their own messages": (_classes("env_manager_cls", "AgentNative*", "*Sandbox*"),),
}
"""Capability -> where a recipe shows that it needs it."""
