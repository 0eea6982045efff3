"""Parsers of SGLang behind the gateway: what a model writes never fails a request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roll.base.errors import RunError
from roll.distributed.gateway.parsers import tool_parser
from roll.gateway.tool_parsers import ParsedText, hermes, llama3_json

pytestmark = pytest.mark.slow

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_parser_of_sglang_reads_calls() -> None:
    found = tool_parser("qwen25", "")(f"So. {CALL}", TOOLS)
    assert found.calls == (("add", {"a": 1}),) and found.content.strip() == "So."


@pytest.mark.parametrize("error", [ValueError("half a call"), KeyError("name"), RecursionError()])
def test_a_parser_that_raises_leaves_the_text(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def fail(self: object, text: str) -> Iterator[object]:
        raise error

    parse = tool_parser("qwen25", "")
    monkeypatch.setattr(FunctionCallParser, "parse_non_stream", fail)
    assert parse(CALL, TOOLS) == ParsedText(CALL, unread=1)


@pytest.mark.parametrize("name", ["qwen25", "hermes"])
def test_a_call_that_cannot_be_read_is_counted(name: str) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
    assert [tool_parser(name, "")(text, TOOLS).unread for text in (broken, CALL, "No call.")] == [1, 0, 0]


def test_auto_follows_the_template_and_an_unknown_name_is_refused() -> None:
    assert tool_parser("auto", '{{ {"name": name, "parameters": arguments} }}') is llama3_json
    assert tool_parser("auto", "<tool_call>") is hermes
    with pytest.raises(RunError, match="gateway.tool_parser: 'hermez' is not a parser; did you mean hermes?"):
        tool_parser("hermez", "")
