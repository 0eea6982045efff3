"""Tool calls in the form of Hermes, which Qwen's chat templates use: JSON between tags.

<tool_call>
{"name": "search", "arguments": {"query": "tides"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from roll.base.json_values import read_json

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

THOUGHTS_END = "</think>"
"""Calls before it are thoughts."""

TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's chat templates write into the system message, and what its models were trained on."""


class ToolError(Exception):
    """A tool call failed; the model reads the message."""


@dataclass(frozen=True)
class ToolCall:
    """A call in a model's text."""

    name: str
    arguments: dict[str, Any]


def find_calls(text: str) -> Iterator[tuple[slice, ToolCall | ToolError]]:
    """The calls in a model's text and their places, in order; an error for one that cannot be read."""
    for found in CALL.finditer(text, text.rfind(THOUGHTS_END) + 1):
        call = read_call(found[1], "arguments")
        unclosed = isinstance(call, ToolError) and not found[2]
        yield slice(*found.span()), ToolError("the call has no </tool_call>") if unclosed else call


def read_call(text: str, key: str) -> ToolCall | ToolError:
    """The call that a JSON object describes, with its arguments under `key`."""
    try:
        call = read_json(text)
    except ValueError as error:
        return ToolError(f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolError(f'the call has no name; write {{"name": ..., "{key}": {{...}}}}')
    arguments = call.get(key, call.get("arguments", {}))
    if not isinstance(arguments, dict):
        return ToolError(f"the {key} of {call['name']} are no object; write {{...}}")
    return ToolCall(call["name"], arguments)


def tools_text(schemas: Iterable[dict[str, Any]]) -> str:
    """What the model reads about its tools; a schema has the form of the `tools` of a chat completion."""
    return TOOLS_TEXT.format(signatures="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


def response_message(result: str) -> str:
    """The result of a call as the model reads it."""
    return f"<tool_response>\n{result}\n</tool_response>"


def function_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A function in the form of the `tools` of a chat completion."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_parameter(name: str, description: str) -> dict[str, Any]:
    """The parameters of a function of one text."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
    }


def text_argument(call: ToolCall, name: str) -> str:
    """The only argument of a function of one text.

    Raises:
        ToolError: it is missing or no text, or there are others.
    """
    value = call.arguments.get(name)
    if not isinstance(value, str) or len(call.arguments) > 1:
        raise ToolError(f"{call.name} takes one argument, the text {name!r}")
    return value
