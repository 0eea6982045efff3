"""Agents of the user that call the policy through an OpenAI-compatible endpoint: what a class of theirs imports.

Imports nothing but the standard library, so that it costs an agent no time. `tasks` reads task files.
"""

from roll.agents.agent import Agent, Result

__all__ = ["Agent", "Result"]
