"""Environments of ROLL's recipes: stand-ins for the base files of a recipe that comes alone, and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.base.schema import Tree
from roll.compat.recipe import Recipe
from roll.configs.environments import SYSTEM_TEMPLATE, TURN_TEMPLATE

CLASSES = {"traj_envs": "TrajEnvManager", "step_envs": "StepEnvManager"}
"""Name of a base file -> class of its environment managers."""

GRID_SYMBOLS = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
"""Symbols of a Sokoban grid in the entry with its own vocabulary."""


def base_file(name: str) -> Tree | None:
    """The contents of a base file of this name, with the messages of this project; None if there is no such file.

    Entries are in `custom_env`, and refer to keys that a recipe may set.
    """
    if name not in CLASSES:
        return None
    boxes = {"action_pattern": "${action_pattern}", "format_penalty": "${sokoban_format_penalty}"}
    lake = {"format_penalty": "${frozen_format_penalty}", "is_slippery": False}
    return {
        "action_pattern": "<answer>(.*?)</answer>",
        "think_action_pattern": r"<think>(.*?)</think>\s*<answer>(.*?)</answer>",
        "max_tokens_per_step": 128,
        "max_actions_per_traj": 10,
        "sokoban_format_penalty": -0.15 if name == "traj_envs" else -0.05,
        "frozen_format_penalty": -0.01,
        "env_manager_cls": CLASSES[name],
        "agent_system_template": SYSTEM_TEMPLATE,
        "agent_template": TURN_TEMPLATE,
        "custom_env": {
            "SimpleSokoban": _entry("sokoban", {**boxes, "dim_room": [6, 6], "num_boxes": 1}),
            "LargerSokoban": _entry("sokoban", {**boxes, "dim_room": [10, 10], "num_boxes": 2, "search_depth": 10}),
            "SokobanDifferentGridVocab": _entry(
                "sokoban",
                {**boxes, "dim_room": [6, 6], "num_boxes": 1, "search_depth": 30, "grid_lookup": GRID_SYMBOLS},
            ),
            "FrozenLake": _entry("frozen_lake", {**lake, "action_pattern": "${action_pattern}"}),
            "FrozenLakeThink": _entry("frozen_lake", {**lake, "action_pattern": "${think_action_pattern}"}),
            "WebShopEnv": _entry("webshop", {"observation_mode": "text"}),
        },
    }


def _entry(env_type: str, options: dict[str, Any]) -> Tree:
    return {
        "env_type": env_type,
        "max_steps": "${max_actions_per_traj}",
        "max_tokens_per_step": "${max_tokens_per_step}",
        "env_manager_cls": "${env_manager_cls}",
        "agent_system_template": "${agent_system_template}",
        "agent_template": "${agent_template}",
        "env_config": {**options, "max_steps": "${max_actions_per_traj}"},
    }


ELSEWHERE = {
    "search": "it asks a server; name files in env_config.tools.search.files",
    "mcp": "a server here speaks over its standard streams; name its command in env_config.tools.mcp",
}
"""Our tool -> why its arguments there cannot be read."""

TOOL_IDS = {"python_code": "python", "search": "search", "mcp": "mcp", "mcp_tool": "mcp"}
"""`tool_id` there -> our tool."""

REWARDS = ("tool_reward", "tool_success_reward")


def read_tools(recipe: Recipe) -> None:
    """The tools of each entry; one that is in `env_config.tools` too is the one there."""
    for tag in recipe.section("custom_envs"):
        path = f"custom_envs.{tag}.tool_wrapper"
        wrapper = recipe.get(path)
        if not isinstance(wrapper, Mapping) or not isinstance(wrapper.get("tool_configs"), list):
            continue
        recipe.take(path)
        for index, config in enumerate(wrapper["tool_configs"]):
            where = f"{path}.tool_configs[{index}]"
            if isinstance(config, Mapping):
                _read_tool(recipe, where, f"custom_envs.{tag}.env_config.tools", config)
            else:
                recipe.refuse(where, config, "a section with a tool_id")
        _read_arguments(recipe, f"{path}.wrapper_args", wrapper.get("wrapper_args"))


def _read_tool(recipe: Recipe, path: str, tools: str, config: Mapping[str, Any]) -> None:
    there, arguments = str(config.get("tool_id")), config.get("tool_args")
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    name = TOOL_IDS.get(there)
    if name is None:
        recipe.error(path, f"tool_id {there} is not available; env_config.tools has python, search and mcp")
    elif recipe.get(f"{tools}.{name}") is not None:
        recipe.note(path, f"{there} is read as {tools}.{name}, which is given")
    elif name in ELSEWHERE:
        recipe.error(path, f"{there}: {ELSEWHERE[name]}")
    else:
        timeout_s = arguments.pop("timeout", None)
        recipe.put(f"{tools}.{name}", {} if timeout_s is None else {"timeout_s": timeout_s})
        recipe.note(path, f"{there} is read as {tools}.{name}, in the sandbox (docs/environments/tools.md)")
        for key in arguments:
            recipe.note(f"{path}.tool_args.{key}", "has no effect: programs run in the sandbox")


def _read_arguments(recipe: Recipe, path: str, given: Any) -> None:
    for key, value in given.items() if isinstance(given, Mapping) else ():
        if key not in REWARDS:
            recipe.note(f"{path}.{key}", "has no effect: max_steps bounds the turns, and a turn with calls is one")
        elif value:
            recipe.error(f"{path}.{key}", f"{value} is not available: calls have reward 0; set it to 0")
