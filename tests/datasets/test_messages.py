"""All parts of messages reach the chat template, or the part that it leaves out is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from examples.tiny_math.prepare import END, make_tokenizer
from roll.configs.arguments import DataArguments
from roll.datasets.preferences import encode_preferences, load_preferences
from roll.datasets.prompts import Question, load_prompts
from roll.datasets.records import DatasetError
from roll.datasets.sft import encode_sft_data, load_sft_data
from roll.datasets.templates import PromptEncoder
from tests.datasets.files import jsonl

TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

USER = {"role": "user", "content": "1+2?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds"}}]


def tokenizer_with(template: str) -> PreTrainedTokenizerBase:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(file: str, template: str = TOOLS_TEMPLATE) -> list[str]:
    encoder = PromptEncoder(tokenizer_with(template), "native")
    prompts = load_prompts(file, DataArguments(), lambda tag: {})
    return [encoder.render(prompt.question) for prompt in prompts]


def test_calls_and_tools_are_rendered_also_where_they_are_json_in_a_text(tmp_path: Path) -> None:
    text = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}
    arguments = json.dumps(CALL["function"]["arguments"])
    openai = CALLS | {"tool_calls": [CALL | {"function": CALL["function"] | {"arguments": arguments}}]}
    rows = [{"messages": [USER, calls, RESULT], "tools": TOOLS} for calls in (CALLS, text, openai)]
    rows.append({"messages": [USER, CALLS, RESULT], "tools": json.dumps(TOOLS)})
    rows.append({"messages": json.dumps([USER, CALLS, RESULT]), "tools": [json.dumps(TOOLS[0])]})
    expected = (
        json.dumps(TOOLS) + '[user]1+2?<end>[assistant]<call>add {"a": 1, "b": 2}</call><end>[tool]3<end>[assistant]'
    )
    assert rendered(jsonl(tmp_path, *rows)) == [expected] * 5


def test_nulls_that_parquet_adds_are_no_fields(tmp_path: Path) -> None:
    other = CALLS | {"tool_calls": [{"id": "c2", "type": "function", "function": {"name": "f", "arguments": {"z": 1}}}]}
    rows: list[dict[str, Any]] = [{"messages": [USER, calls], "tools": TOOLS} for calls in (CALLS, other)]
    rows.append({"messages": [USER], "tools": None})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    prompts = load_prompts(str(tmp_path / "data.parquet"), DataArguments(), lambda tag: {})
    assert [prompt.question.messages for prompt in prompts] == [(USER, CALLS), (USER, other), (USER,)]
    assert [prompt.question.tools for prompt in prompts] == [tuple(TOOLS), tuple(TOOLS), ()]


def test_parts_of_text_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]
    assert rendered(jsonl(tmp_path, {"messages": [USER | {"content": parts}]})) == ["[user]1+2?<end>[assistant]"]
    with pytest.raises(DatasetError, match=r"data\.jsonl:1: .* parts \['text', 'image_url'\]"):
        rendered(jsonl(tmp_path, {"messages": [USER | {"content": [parts[0], {"type": "image_url"}]}]}))


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER, CALLS, RESULT]}, "tool_calls"),
        ({"messages": [USER], "tools": TOOLS}, "tools"),
        ({"prompt": "1+2?", "tools": TOOLS}, "tools"),
        ({"messages": [USER | {"name": "Ada"}]}, "name"),
        (
            {"messages": [USER, {"role": "assistant", "content": "3", "reasoning_content": "hm"}, USER]},
            "reasoning_content",
        ),
    ],
)
def test_a_part_that_the_template_leaves_out_is_named_with_its_row(
    tmp_path: Path, row: dict[str, Any], name: str
) -> None:
    file = jsonl(tmp_path, {"messages": [USER]}, row)
    with pytest.raises(DatasetError, match=rf"data\.jsonl:2: the chat template leaves out '{name}'"):
        rendered(file, PLAIN_TEMPLATE)


def test_thoughts_of_earlier_turns_may_be_left_out_by_a_template_that_knows_them(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    [text] = rendered(jsonl(tmp_path, {"messages": [USER, thought, USER]}))
    assert text == "[user]1+2?<end>[assistant]3<end>[user]1+2?<end>[assistant]"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, PLAIN_TEMPLATE.replace("m.content", "m.content | trim")])
def test_a_prompt_that_ends_with_the_assistants_words_is_continued(tmp_path: Path, template: str) -> None:
    file = jsonl(tmp_path, {"messages": [USER, {"role": "assistant", "content": "Let me see: "}]})
    assert rendered(file, template) == ["[user]1+2?<end>[assistant]Let me see: "]


def test_an_answer_that_is_a_call_is_learned_as_rendered(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TOOLS_TEMPLATE)
    thought = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    rows = [{"messages": [USER, CALLS, RESULT, thought], "tools": TOOLS}, {"messages": [USER, CALLS], "tools": TOOLS}]
    data = load_sft_data(jsonl(tmp_path, *rows), DataArguments())
    call = '<call>add {"a": 1, "b": 2}</call>'
    last, _ = encode_sft_data(data, tokenizer, "native", 1000, 1000)
    assert [tokenizer.decode(example.response_ids) for example in last] == [f"<think>hm</think>3{END}", f"{call}{END}"]
    every, _ = encode_sft_data(data, tokenizer, "native", 1000, 1000, mask_history=False)
    learned = [token for token, learn in zip(every[0].response_ids, every[0].loss_mask or (), strict=True) if learn]
    assert tokenizer.decode(learned) == f"{call}{END}<think>hm</think>3{END}"
    assert tokenizer.decode(every[0].prompt_ids) == json.dumps(TOOLS) + "[user]1+2?<end>[assistant]"


def test_a_continued_answer_is_one_message_where_every_answer_is_learned(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(PLAIN_TEMPLATE)
    row = {"messages": [USER, {"role": "assistant", "content": "It is "}], "solution": "3"}
    data = load_sft_data(jsonl(tmp_path, row), DataArguments())
    texts = []
    for mask_history in (True, False):
        [example], _ = encode_sft_data(data, tokenizer, "native", 100, 100, mask_history=mask_history)
        texts.append((tokenizer.decode(example.prompt_ids), tokenizer.decode(example.response_ids)))
    assert texts == [("[user]1+2?<end>[assistant]It is ", f"3{END}"), ("[user]1+2?<end>[assistant]", f"It is 3{END}")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "solution": ""},
        {"prompt": "q", "solution": " \n"},
        {"prompt": "q", "solution": []},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": []}]},
    ],
)
def test_an_empty_answer_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=r"data\.jsonl:2: column .*not empty"):
        load_sft_data(jsonl(tmp_path, {"prompt": "q", "solution": "a"}, row), DataArguments())


def test_answers_of_pairs_may_be_calls(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(TOOLS_TEMPLATE)
    row = {"chosen": [USER, CALLS], "rejected": [USER, {"role": "assistant", "content": "4"}], "tools": TOOLS}
    [pair], _ = encode_preferences(
        load_preferences(jsonl(tmp_path, row), DataArguments()), tokenizer, "native", 200, 300
    )
    assert tokenizer.decode(pair.chosen.response_ids) == '<call>add {"a": 1, "b": 2}</call>' + END
    assert tokenizer.decode(pair.rejected.response_ids) == "4" + END
    assert tokenizer.decode(pair.chosen.prompt_ids) == json.dumps(TOOLS) + "[user]1+2?<end>[assistant]"


def test_a_response_column_may_hold_messages(tmp_path: Path) -> None:
    data = load_sft_data(
        jsonl(tmp_path, {"prompt": "1+2?", "solution": [{"role": "assistant", "content": "3"}]}), DataArguments()
    )
    assert [(item.question, item.response) for item in data] == [(Question(text="1+2?"), "3")]


def test_a_template_that_requires_content_null_beside_calls_gets_it(tmp_path: Path) -> None:
    template = TOOLS_TEMPLATE.replace("{{ m.content }}", "{% if m.content is not none %}{{ m.content }};{% endif %}")
    [text] = rendered(jsonl(tmp_path, {"messages": [USER, CALLS, RESULT]}), template)
    assert text.startswith("[user]1+2?;<end>[assistant]<call>add")
