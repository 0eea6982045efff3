"""FSDP's sections of trained roles and references, and the keys of Megatron that replace them."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from roll.base.schema import Tree
from roll.compat.recipe import Recipe, is_count, shown
from roll.compat.systems.roll import ROLL_VALUES
from roll.configs.devices.megatron import MegatronConfig, MegatronTrainConfig

ENGINES = {
    "actor_train": ("megatron_train", MegatronTrainConfig),
    "critic": ("megatron_train", MegatronTrainConfig),
    "reference": ("megatron_infer", MegatronConfig),
}
"""Role -> Megatron's engine in place of FSDP, and its options."""

FSDP = re.compile(r"fsdp2?_(train|infer)")

OFFLOAD, DTYPE, RECOMPUTE = "optimizer_cpu_offload", "model_args.dtype", "recompute_granularity"

KEYS = {
    "param_dtype": DTYPE,
    "reduce_dtype": "accumulate_allreduce_grads_in_fp32",
    "offload_policy": OFFLOAD,
    "ep_size": "expert_model_parallel_size",
}
"""Option of FSDP -> option of Megatron, or key of the role."""

WITHOUT = """fsdp_size efsdp_size reshard_after_forward wrap_policy apply_tiled_mlp tiled_num_shards
    use_batched_model_update reduce_scatter_during_grad_accumulation""".split()
"""Options of FSDP alone without a counterpart."""

WHOLE = "every data-parallel rank has whole weights, which tensor_model_parallel_size splits"


def read_fsdp(recipe: Recipe) -> None:
    """Makes FSDP's sections ones for Megatron, each with one remark that says what became of its keys.

    A section for Megatron is translated too where it has options of FSDP, which an override of `strategy_name` leaves
    behind. A key of Megatron that is given as well wins.
    """
    for role, (engine, options) in ENGINES.items():
        path = f"{role}.strategy_args"
        name, given = recipe.get(f"{path}.strategy_name"), recipe.get(f"{path}.strategy_config") or {}
        from_fsdp = isinstance(name, str) and FSDP.fullmatch(name) is not None
        given = given if isinstance(given, dict) else {}
        left = name in (None, engine) and not given.keys().isdisjoint({*KEYS, *WITHOUT})
        if not (from_fsdp or left) or (role == "critic" and recipe.get("adv_estimator", "gae") != "gae"):
            continue
        known = {key.name for key in fields(options)}
        of_fsdp = given.keys() if from_fsdp else {*KEYS, *WITHOUT}
        read, dropped = _translate(recipe, role, given, {*known, *(given.keys() - of_fsdp)})
        if from_fsdp and RECOMPUTE in known and _recomputes(recipe, role):
            recipe.put(f"{path}.strategy_config.{RECOMPUTE}", "full")
            read.append(f"gradient checkpointing, which is on there, as {RECOMPUTE} full")
        recipe.put(f"{path}.strategy_name", engine)
        parts = [", ".join(read), f"without effect: {', '.join(dropped)}" if dropped else ""]
        parts.append(WHOLE if "fsdp_size" in dropped else "")
        if from_fsdp:
            parts[0] = f"{name} is read as {engine}{': ' if read else ''}{parts[0]}"
        recipe.note(f"{path}.{'strategy_name' if from_fsdp else 'strategy_config'}", "; ".join(filter(None, parts)))


def read_ulysses(recipe: Recipe, role: str, path: str) -> None:
    """The split of sequences of FSDP: context parallelism, whose exchange needs no number of heads."""
    if is_count(recipe.get(path)) and recipe.get(path) > 1:
        recipe.move(path, f"{role}.strategy_args.strategy_config.context_parallel_size")


def _translate(recipe: Recipe, role: str, given: Tree, kept: set[str]) -> tuple[list[str], list[str]]:
    """Puts Megatron's options of a role; what was read as which, and what has no effect."""
    section: Tree = {name: value for name, value in given.items() if name in kept}
    read, dropped = [], []
    for name, value in given.items():
        if name in kept:
            continue
        target, ours = KEYS.get(name), _value(name, value)
        if target == DTYPE and f"{role}.{DTYPE}" not in recipe.overridden:
            recipe.put(f"{role}.{DTYPE}", ours)
        elif target in kept and target not in given and (target != OFFLOAD or _offloads(recipe, role, given)):
            section[target] = ours
        else:
            dropped.append(name)
            continue
        read.append(f"{name} {shown(value)} as {target} {shown(ours)}")
    recipe.put(f"{role}.strategy_args.strategy_config", section)
    return read, dropped


def _value(name: str, value: Any) -> Any:
    if name == "reduce_dtype":
        return _precision(value) == "fp32"
    if name == "offload_policy":
        return bool(value)
    return _precision(value) if name == "param_dtype" else value


def _precision(value: Any) -> Any:
    return ROLL_VALUES["dtype"].get(value, value) if isinstance(value, str) else value


def _offloads(recipe: Recipe, role: str, given: Tree) -> bool:
    """Whether Megatron can keep Adam's state in host memory."""
    precision = _precision(given.get("param_dtype", recipe.get(f"{role}.{DTYPE}")))
    return bool(recipe.get("platform") != "cpu" and precision != "fp32")


def _recomputes(recipe: Recipe, role: str) -> bool:
    path = f"{role}.strategy_args.strategy_config.{RECOMPUTE}"
    return not recipe.has(path) and not recipe.get(f"{role}.model_args.disable_gradient_checkpointing")
