from __future__ import annotations

import pyarrow
import pyarrow.parquet
import pytest

from roll.configs.roles import DataArguments
from roll.datasets.prompts import Prompt, Question, load_prompts
from roll.datasets.records import DatasetError
from tests.datasets.files import jsonl, row

ARGUMENTS = DataArguments()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def failure(*rows, folder, arguments=ARGUMENTS) -> str:
    with pytest.raises(DatasetError) as caught:
        load_prompts(jsonl(folder, *rows), arguments)
    return str(caught.value)


def test_columns_become_prompts_in_order_over_files(tmp_path):
    files = [jsonl(tmp_path, row(1), "", row(2)), jsonl(tmp_path, row(3), name="more.jsonl")]
    prompts = load_prompts(files, ARGUMENTS)
    assert prompts[0] == Prompt("p1", "math_rule", Question(text="1+1="), "2")
    assert [prompt.id for prompt in prompts] == ["p1", "p2", "p3"]


def test_columns_have_the_names_the_configuration_gives(tmp_path):
    arguments = DataArguments(id="key", tag="kind", prompt="problem", ground_truth="answer")
    file = jsonl(tmp_path, {"key": 7, "kind": "x", "problem": "q", "answer": "a"})
    assert load_prompts(file, arguments) == [Prompt("7", "x", Question(text="q"), "a")]


def test_messages_are_used_where_present_and_the_solution_where_there_is_no_ground_truth(tmp_path):
    file = jsonl(tmp_path, {"messages": CHAT, "prompt": "unused", "solution": r"so \boxed{2}"})
    (prompt,) = load_prompts(file, ARGUMENTS)
    assert prompt.question == Question(messages=tuple(CHAT))
    assert prompt.ground_truth == r"so \boxed{2}"
    assert (prompt.id, prompt.tag) == ("data:1", "default")


def test_verl_parquet_is_a_prompt_source(tmp_path):
    text = "Xavier needs 84 paper plates. He already has 21 green plates and 28 red plates. How many more?"
    rows = [
        {
            "data_source": "openai/gsm8k",
            "ability": "math",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"ground_truth": "35", "style": "rule"},
            "extra_info": {"index": 12, "split": "train"},
        }
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    expected = Prompt("openai/gsm8k/12", "openai/gsm8k", Question(messages=({"role": "user", "content": text},)), "35")
    assert load_prompts(str(path), ARGUMENTS) == [expected]


def test_a_uid_is_an_id(tmp_path):
    file = jsonl(tmp_path, {"prompt": "q", "ground_truth": "1", "uid": "u1"}, {"prompt": "q", "ground_truth": 1})
    assert [prompt.id for prompt in load_prompts(file, ARGUMENTS)] == ["u1", "data:2"]


def test_a_missing_file_is_named_with_where_it_was_looked_for():
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl: no such file \(looked in /"):
        load_prompts("nowhere.jsonl", ARGUMENTS)
    with pytest.raises(DatasetError, match="data_args.file_name names no file"):
        load_prompts([], ARGUMENTS)


def test_an_empty_or_foreign_file_is_an_error(tmp_path):
    assert "the file is empty" in failure(folder=tmp_path)
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(DatasetError, match=r"cannot read \.csv; use \.jsonl, \.json, \.parquet"):
        load_prompts(str(tmp_path / "data.csv"), ARGUMENTS)
    (tmp_path / "data.parquet").write_text("nonsense")
    with pytest.raises(DatasetError, match="not a parquet file"):
        load_prompts(str(tmp_path / "data.parquet"), ARGUMENTS)


def test_a_bad_line_is_named_by_its_number(tmp_path):
    assert "data.jsonl:2: not JSON" in failure(row(1), '{"id": ', folder=tmp_path)
    assert "data.jsonl:1: holds a list; write one JSON object per line" in failure("[1]", folder=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13; save the file as UTF-8"),
        (b'{"index": ' + b"1" * 5000 + b"}", "a number has too many digits; put it in quotes"),
        (b"[" * 100_000, "objects or lists stand inside each other too deep"),
    ],
)
def test_bytes_that_are_no_row_are_named_by_their_line(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(DatasetError, match=f"data.jsonl:2: {message}"):
        load_prompts(str(tmp_path / "data.jsonl"), ARGUMENTS)


def test_a_character_written_in_two_halves_is_whole(tmp_path):
    (prompt,) = load_prompts(jsonl(tmp_path, row(1, prompt="\U0001f600")), ARGUMENTS)
    assert prompt.question.text == "\U0001f600"


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(number) for number in range(100)]), path)
    whole = bytearray(path.read_bytes())
    whole[4:64] = b"\xff" * 60
    path.write_bytes(whole)
    with pytest.raises(DatasetError, match="data.parquet: not a parquet file, or a damaged one: "):
        load_prompts(str(path), ARGUMENTS)


def test_a_path_that_cannot_be_read_is_told():
    with pytest.raises(DatasetError, match="cannot be read: File name too long"):
        load_prompts("a" * 300 + ".jsonl", ARGUMENTS)


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    message = failure({"id": 1, "problem": "q", "answer": "a"}, folder=tmp_path)
    assert "data.jsonl:1: no column 'prompt' or 'messages'; the columns are id, problem, answer" in message
    message = failure({"prompt": "q", "label": "a"}, folder=tmp_path)
    assert "no column 'ground_truth' or 'reward_model.ground_truth' or 'solution'" in message
    assert "the columns are prompt, label" in message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ""}, "column 'prompt' holds ''"),
        ({"prompt": " \n"}, r"column 'prompt' holds ' \n'; it takes a text or a list of messages, not empty"),
        ({"prompt": 5}, "column 'prompt' holds 5"),
        (
            {"messages": [{"role": "user"}]},
            "column 'messages' holds {'role': 'user'}; a message is an object with a role and a content",
        ),
        (
            {"messages": [{"role": "human", "content": "Hi"}]},
            "column 'messages' holds a message of 'human'; a role is one of system, user, assistant, tool",
        ),
        ({"ground_truth": None}, "column 'ground_truth' is empty (null); give it a value"),
        ({"ground_truth": ""}, "column 'ground_truth' holds ''; no response could be compared with that"),
        ({"ground_truth": float("nan")}, "column 'ground_truth' holds nan; no response could be compared with that"),
        ({"id": None, "extra_info": "x"}, "column 'extra_info' holds a str; it takes an object, such as {'index': 7}"),
        ({"id": None, "extra_info": [7]}, "column 'extra_info' holds a list; it takes an object"),
        ({"prompt": "\ud800"}, r"\ud800 is half a character; remove it, or write the other half too"),
        ({"ground_truth": ["1"]}, "column 'ground_truth' holds a list"),
        ({"ground_truth": True}, "column 'ground_truth' holds a bool"),
    ],
)
def test_a_column_of_the_wrong_kind_is_an_error(tmp_path, columns, message):
    assert f"data.jsonl:1: {message}" in failure(row(1, **columns), folder=tmp_path)


def test_ids_that_stand_twice_are_named(tmp_path):
    message = failure(row(1), row(2), row(1), folder=tmp_path)
    file = tmp_path / "data.jsonl"
    assert f"ids that stand more than once: p1 ({file}:1 and {file}:3); ids must be unique" in message
