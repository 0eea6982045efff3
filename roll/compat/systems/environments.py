"""Stand-ins for the base files from which recipes of ROLL take their environments, for a recipe that comes alone."""

from __future__ import annotations

from typing import Any

from roll.base.schema import Tree
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
