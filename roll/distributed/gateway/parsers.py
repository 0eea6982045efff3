"""Parsers of tool calls and thoughts by name: those of the gateway, and those of SGLang, which are imported on use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.base.errors import RunError
from roll.base.json_values import read_json
from roll.base.text import nearest
from roll.gateway.tool_parsers import (
    HERMES,
    LLAMA3_JSON,
    THINK,
    TOOL_PARSERS,
    ParsedText,
    ReasoningParser,
    ToolParser,
    thoughts,
)

AUTO = "auto"


def tool_parser(name: str, template: str) -> ToolParser:
    """The parser of this name; `auto` is that of the chat template, whose source is `template`.

    Raises:
        RunError: there is none of this name.
    """
    if name == AUTO:
        name = LLAMA3_JSON if '"parameters"' in template and "<tool_call>" not in template else HERMES
    if name in TOOL_PARSERS:
        return TOOL_PARSERS[name]
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    _check("tool_parser", name, [AUTO, *TOOL_PARSERS, *FunctionCallParser.ToolCallParserEnum])

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
        parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
        if not parser.has_tool_call(text):
            return ParsedText(text)
        try:
            content, calls = parser.parse_non_stream(text)
            read = tuple((call.name, read_json(call.parameters or "{}")) for call in calls)
        except Exception:  # detectors raise errors of all kinds where a model writes half a call
            return ParsedText(text, unread=1)
        return ParsedText(content, read) if read else ParsedText(text, unread=1)

    return parse


def reasoning_parser(name: str | None) -> ReasoningParser | None:
    """The parser of this name; None for None.

    Raises:
        RunError: there is none of this name.
    """
    if name is None:
        return None
    if name in THINK:
        return thoughts
    from sglang.srt.parser.reasoning_parser import ReasoningParser as SGLangParser

    _check("reasoning_parser", name, [*SGLangParser.DetectorMap])
    return lambda text: _parts(*SGLangParser(name, stream_reasoning=False).parse_non_stream(text))


def _parts(thought: str | None, text: str | None) -> tuple[str | None, str]:
    return thought or None, text or ""


def _check(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        like = nearest(name, known)
        hint = f"; did you mean {like}?" if like else f"; known: {', '.join(known)}"
        raise RunError(f"gateway.{key}: {name!r} is not a parser{hint}")
