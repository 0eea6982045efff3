"""Options of vLLM and spellings of other SGLang launchers, and the SGLang options that replace them."""

from __future__ import annotations

from typing import Any

from roll.compat.recipe import Recipe, shown
from roll.compat.rules import Table
from roll.configs.devices.sglang_options import OWNED, VLLM_NAMES, VLLM_ROLE_NAMES, server_options

NEGATED_OPTIONS = {"enable_prefix_caching": "disable_radix_cache"}
"""vLLM option -> SGLang option with the opposite meaning."""

VLLM = Table(values={"top_k": {-1: 0}})

ENGINE = "actor_infer.strategy_args"

SGLANG_ROLE_OPTIONS = VLLM_ROLE_NAMES | {
    "tp_size": "num_gpus_per_worker",
    "max_running_requests": "max_running_requests",
}
"""The same for options of SGLang that the framework sets."""

SGLANG_LAUNCH_OPTIONS = ("grpc_mode", "pipeline_parallel_size", "pp_size", "data_parallel_size", "dp_size")
"""Options of SGLang's launcher that have no meaning for an engine inside a worker."""


def read_engine(recipe: Recipe) -> None:
    """Makes vLLM's section of actor_infer one for SGLang, with one remark that says what became of each key.

    A section for SGLang is translated too where it has spellings of vLLM, which an override of `strategy_name` leaves
    behind, or names the size of an engine. A key of SGLang that is given as well wins.
    """
    name, given = recipe.get(f"{ENGINE}.strategy_name"), recipe.get(f"{ENGINE}.strategy_config") or {}
    if name not in ("vllm", "sglang"):
        return
    if not isinstance(given, dict):
        recipe.put(f"{ENGINE}.strategy_name", "sglang")
        return
    engine: dict[str, Any] = {}
    read, kept, dropped = [], [], []
    for option, value in given.items():
        path, ours = _target(option, value, name)
        if option == "block_size" and recipe.get("platform") == "cpu":
            path = None  # the engine's cache has pages of one token on cpu
        longest = _longest(recipe)
        if option == "max_model_len" and name == "vllm" and isinstance(value, int) and value < longest:
            recipe.note(f"{ENGINE}.strategy_config.{option}", f"{value} would cut sequences; the context is {longest}")
            continue
        if path is None:
            dropped.append(option)
        elif path != option and path in given:
            dropped.append(f"{option} ({path} is given)")
        elif path == option:
            engine[option] = value
            kept.append(option)
        else:
            read.append(f"{option} {shown(value)} as {path}{'' if ours is value else f' {shown(ours)}'}")
            if not path.startswith("actor_infer."):
                engine[path] = ours
            elif path not in recipe.overridden:
                recipe.put(path, ours)
    recipe.put(ENGINE, {**recipe.section(ENGINE), "strategy_name": "sglang", "strategy_config": engine})
    parts = [", ".join(read), f"without effect: {', '.join(dropped)}" if dropped else ""]
    if name == "vllm":
        parts[0] = f"vllm is read as sglang{': ' if read else ''}{parts[0]}"
        parts.insert(1, f"unchanged: {', '.join(kept)}" if kept else "")
    message = "; ".join(filter(None, parts))
    if message:
        recipe.note(f"{ENGINE}.{'strategy_name' if name == 'vllm' else 'strategy_config'}", message)


def _longest(recipe: Recipe) -> int:
    """Tokens of the longest sequence; 0 where a recipe does not say it."""
    parts = [recipe.get("prompt_length"), recipe.get("response_length")]
    lengths = parts if all(isinstance(part, int) for part in parts) else [recipe.get("sequence_length")]
    return sum(length for length in lengths if isinstance(length, int))


def _target(option: str, value: Any, engine: str) -> tuple[str | None, Any]:
    """Key and value that an option is read as; no key without an effect. Keys of the role begin with `actor_infer.`."""
    known = server_options() or {}
    if engine == "sglang" and option in SGLANG_LAUNCH_OPTIONS and value in (None, False, 1):
        return None, None
    roles = VLLM_ROLE_NAMES if engine == "vllm" else SGLANG_ROLE_OPTIONS
    if option in roles:
        return f"actor_infer.{roles[option]}", value
    if engine == "vllm" or option not in known:
        if option in VLLM_NAMES:
            return VLLM_NAMES[option], value
        if option in NEGATED_OPTIONS:
            return NEGATED_OPTIONS[option], not value
    if engine == "sglang":
        return option, value
    return (option if option in known and option not in OWNED else None), value
