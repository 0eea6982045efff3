"""Text environments for agents: an observation is text, an action is the text that a model wrote.

Imports gymnasium, numpy and `roll.configs`, nothing that runs an engine; importing this folder registers its
environments with gymnasium. See docs/environments.md for what there is and how to add one.
"""

from roll.envs.base import EnvConfig, TextEnv, Turn
from roll.envs.registry import make_env

__all__ = ["EnvConfig", "TextEnv", "Turn", "make_env"]
