"""What a model is told each turn: the default texts, the fields they may hold, and how a file's own are checked."""

from __future__ import annotations

from string import Formatter
from typing import Any

SYSTEM_FIELDS = ("env_instruction",)
"""Fields of `agent_system_template`, which is said once, before the first turn."""

TURN_FIELDS = ("turn_idx", "observation", "actions_left", "max_response_length", "env_instruction")
"""Fields of `agent_template`, which is said every turn."""

SYSTEM_TEMPLATE = "You act in an environment, one action per turn, and want the highest total reward."
"""`agent_system_template` where the file is silent."""

TURN_TEMPLATE = """Turn {turn_idx}:
{observation}
Actions left: {actions_left}. Think briefly, then give one action, in at most {max_response_length} tokens."""
"""`agent_template` where the file is silent. `turn_idx` counts from 1."""


def system_template(text: Any) -> Any:
    """An `agent_system_template`, its fields checked; what is no text is for the type check to judge.

    Raises:
        ValueError: a field is unknown, or braces do not match.
    """
    if isinstance(text, str):
        fields_of(text, SYSTEM_FIELDS)
    return text


def turn_template(text: Any) -> Any:
    """An `agent_template`, its fields checked; what is no text is for the type check to judge.

    Raises:
        ValueError: a field is unknown, braces do not match, or the observation is left out.
    """
    if isinstance(text, str) and "observation" not in fields_of(text, TURN_FIELDS):
        raise ValueError("leaves out {observation}, so the model would see nothing of the environment; put it in")
    return text


def fields_of(text: str, known: tuple[str, ...]) -> list[str]:
    """Names between braces, each of which is in `known`.

    Raises:
        ValueError: one is not, or braces do not match.
    """
    literal = "write {{ and }} for braces in the text"
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"braces do not match ({error}); {literal}") from None
    for name in names:
        if name not in known:
            raise ValueError(f"{{{name}}} is no field; known: {', '.join(f'{{{one}}}' for one in known)}; {literal}")
    return names
