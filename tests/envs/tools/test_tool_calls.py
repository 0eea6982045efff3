"""Tool calls in a model's text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.envs.tools.calls import (
    ToolCall,
    ToolError,
    find_calls,
    function_schema,
    response_message,
    text_argument,
    text_parameter,
    tools_text,
)


def read_calls(text: str) -> list[ToolCall | ToolError]:
    return [call for _, call in find_calls(text)]


def written(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


arguments = st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers() | st.booleans(), max_size=3)


@given(
    st.lists(st.tuples(st.text(max_size=6), arguments), max_size=4), st.sampled_from(["", "So.\n", "<think>x</think>"])
)
def test_calls_are_read_as_they_were_written(calls, before):
    text = before + "\n".join(written(*call) for call in calls)
    assert read_calls(text) == [ToolCall(*call) for call in calls]


@given(st.text("<>/{}\"'\\ tool_callname:arguments,", max_size=60))
def test_no_text_raises(text):
    assert all(isinstance(call, ToolCall | ToolError) for call in read_calls(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "the call is no JSON: "),
        ("<tool_call>[1]</tool_call>", "the call has no name"),
        ('<tool_call>{"name": 3}</tool_call>', "the call has no name"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments of f are no object"),
        ('<tool_call>{"name": "f", ', "the call has no </tool_call>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is no JSON: "),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_with_its_reason(text, message):
    [error] = read_calls(text)
    assert isinstance(error, ToolError) and str(error).startswith(message)


def test_a_call_whose_closing_tag_was_a_stop_string_or_is_missing_is_read():
    assert read_calls('<tool_call>{"name": "f", "arguments": {}}') == [ToolCall("f", {})]


def test_a_call_in_a_thought_is_none():
    thought = f"<think>I could {written('f', {})}</think>"
    assert read_calls(thought) == []
    assert read_calls(f"{thought} {written('g', {})}") == [ToolCall("g", {})]


def test_the_model_reads_signatures_and_results_in_the_form_of_qwen():
    """As the chat template of Qwen2.5 and Qwen3 renders them; the text is in their tokenizer_config.json."""
    schema = function_schema("f", "Does.", text_parameter("query", "What."))
    text = tools_text([schema])
    assert "<tools>\n" + json.dumps(schema) + "\n</tools>" in text
    assert text.endswith('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    assert response_message("7") == "<tool_response>\n7\n</tool_response>"


def test_a_function_of_one_text_takes_only_that():
    assert text_argument(ToolCall("f", {"query": "x"}), "query") == "x"
    for wrong in ({}, {"query": 3}, {"query": "x", "more": 1}):
        with pytest.raises(ToolError, match="f takes one argument, the text 'query'"):
            text_argument(ToolCall("f", wrong), "query")
