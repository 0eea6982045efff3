"""Tool calls and thoughts in the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.envs.tools.calls import ToolCall, ToolError, find_calls, read_call

HERMES, LLAMA3_JSON = "hermes", "llama3_json"

PYTHON_TAG = "<|python_tag|>"
"""What may stand before the calls of Llama 3."""

THINK = ("deepseek-r1", "qwen3")
"""Reasoning parsers of SGLang whose thoughts stand between <think> and </think>."""


@dataclass(frozen=True)
class ParsedText:
    """The text of an answer without tool calls, and the calls: names with their arguments as JSON values.

    `unread` is the number of calls that the model began and that the parser could not read; they are content.
    """

    content: str
    calls: tuple[tuple[str, Any], ...] = ()
    unread: int = 0


ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedText]
"""From the text of an answer and the tools of its request; a text that is not a call stays content."""

ReasoningParser = Callable[[str], tuple[str | None, str]]
"""From the text of an answer to its thoughts, None without any, and the rest."""


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
    """Calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen."""
    found = [*find_calls(text)]
    calls = [(place, call) for place, call in found if isinstance(call, ToolCall)]
    for place, _ in reversed(calls):
        text = text[: place.start] + text[place.stop :]
    named = tuple((call.name, call.arguments) for _, call in calls)
    return ParsedText(text.strip() if calls else text, named, len(found) - len(calls))


def llama3_json(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
    """A text that is one JSON object with `name` and `parameters`, or several with ; between them: Llama 3."""
    given = text.strip().removeprefix(PYTHON_TAG).strip()
    unread = ParsedText(text, unread=int(text.strip().startswith(PYTHON_TAG)))
    decoder, calls, at = json.JSONDecoder(), list[tuple[str, Any]](), 0
    while at < len(given):
        try:
            _, end = decoder.raw_decode(given, at)
        except (ValueError, RecursionError):
            return unread
        call = read_call(given[at:end], "parameters")
        if isinstance(call, ToolError):
            return unread
        calls.append((call.name, call.arguments))
        at = end + len(given[end:]) - len(given[end:].lstrip("; \n"))
    return ParsedText("", tuple(calls)) if calls else unread


TOOL_PARSERS: dict[str, ToolParser] = {HERMES: hermes, LLAMA3_JSON: llama3_json}
"""Parsers that need no engine; others are those of SGLang."""


def thoughts(text: str) -> tuple[str | None, str]:
    """Thoughts before </think>, whether the answer or its prompt began them, and the rest."""
    before, found, after = text.partition("</think>")
    if not found:
        begun = text.lstrip().startswith("<think>")
        return (text.lstrip().removeprefix("<think>").strip(), "") if begun else (None, text)
    return before.strip().removeprefix("<think>").strip(), after.lstrip("\n")


def answered(
    text: str,
    tools: Sequence[Mapping[str, Any]],
    parse: ToolParser | None,
    reason: ReasoningParser | None,
    call_id: str,
) -> tuple[dict[str, Any], int]:
    """The message of an answer, and the number of calls in it that could not be read.

    Arguments of its tool calls are JSON values, and their ids begin with `call_id`.
    """
    thought, rest = (None, text) if reason is None else reason(text)
    parsed = parse(rest, tools) if parse is not None and tools else ParsedText(rest)
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None if parsed.calls else rest}
    if thought is not None:
        message["reasoning_content"] = thought
    if parsed.calls:
        message["tool_calls"] = [
            {"id": f"{call_id}{number}", "type": "function", "function": {"name": name, "arguments": given}}
            for number, (name, given) in enumerate(parsed.calls)
        ]
    return message, parsed.unread
