"""Text environments for agents: the model reads text observations and its text is the action.

Imports gymnasium, numpy and `roll.configs`. Importing this folder registers its environments with gymnasium.
See docs/environments.md for the list of environments and for how to add one.
"""

from roll.envs.base import EnvConfig, TextEnv, Turn
from roll.envs.registry import make_env

__all__ = ["EnvConfig", "TextEnv", "Turn", "make_env"]
