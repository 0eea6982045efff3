from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs.arguments import DataArguments
from roll.datasets.prompts import MixedSampler, Prompt, PromptSampler, Question, load_prompts
from roll.datasets.records import DatasetError
from tests.datasets.files import jsonl, row

ARGUMENTS = DataArguments()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def failure(*rows, folder, arguments=ARGUMENTS) -> str:
    with pytest.raises(DatasetError) as caught:
        load_prompts(jsonl(folder, *rows), arguments)
    return str(caught.value)


def test_prompts_are_read_in_order_from_all_files(tmp_path):
    files = [jsonl(tmp_path, row(1), "", row(2)), jsonl(tmp_path, row(3), name="more.jsonl")]
    prompts = load_prompts(files, ARGUMENTS)
    assert prompts[0] == Prompt("p1", "math_rule", Question(text="1+1="), "2")
    assert [prompt.id for prompt in prompts] == ["p1", "p2", "p3"]


def test_column_names_are_those_of_the_configuration(tmp_path):
    arguments = DataArguments(id="key", tag="kind", prompt="problem", ground_truth="answer")
    file = jsonl(tmp_path, {"key": 7, "kind": "x", "problem": "q", "answer": "a"})
    assert load_prompts(file, arguments) == [Prompt("7", "x", Question(text="q"), "a")]


def test_messages_replace_the_prompt_and_the_solution_a_missing_ground_truth(tmp_path):
    file = jsonl(tmp_path, {"messages": CHAT, "prompt": "unused", "solution": r"so \boxed{2}"})
    (prompt,) = load_prompts(file, ARGUMENTS)
    assert prompt.question == Question(messages=tuple(CHAT))
    assert prompt.ground_truth == r"so \boxed{2}"
    assert (prompt.id, prompt.tag) == ("data:1", "default")


def test_messages_may_be_json_in_a_text(tmp_path):
    texts = json.dumps(CHAT), json.dumps(CHAT, indent=2), "[{} is empty]", '[{"x": 1}]'
    file = jsonl(tmp_path, *(row(number, prompt=text) for number, text in enumerate(texts)))
    chat = Question(messages=tuple(CHAT))
    assert [prompt.question for prompt in load_prompts(file, ARGUMENTS)] == [chat, chat, *map(Question, texts[2:])]
    assert "holds the role 'human'" in failure(row(1, messages='[{"role": "human", "content": "a"}]'), folder=tmp_path)


def test_verls_parquet_layout_is_read(tmp_path):
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


def test_a_uid_is_the_id(tmp_path):
    file = jsonl(tmp_path, {"prompt": "q", "ground_truth": "1", "uid": "u1"}, {"prompt": "q", "ground_truth": 1})
    assert [prompt.id for prompt in load_prompts(file, ARGUMENTS)] == ["u1", "data:2"]


def test_a_missing_file_is_an_error_with_the_folder_searched():
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl: no such file \(looked in /"):
        load_prompts("nowhere.jsonl", ARGUMENTS)
    with pytest.raises(DatasetError, match="data_args.file_name is empty"):
        load_prompts([], ARGUMENTS)


def test_an_empty_or_unsupported_file_is_an_error(tmp_path):
    assert "the file is empty" in failure(folder=tmp_path)
    (tmp_path / "data.csv").write_text("a,b")
    with pytest.raises(DatasetError, match=r"cannot read \.csv; use \.jsonl, \.json, \.parquet"):
        load_prompts(str(tmp_path / "data.csv"), ARGUMENTS)
    (tmp_path / "data.parquet").write_text("nonsense")
    with pytest.raises(DatasetError, match="not a parquet file"):
        load_prompts(str(tmp_path / "data.parquet"), ARGUMENTS)


def test_an_invalid_line_is_an_error_with_its_number(tmp_path):
    assert "data.jsonl:2: not JSON" in failure(row(1), '{"id": ', folder=tmp_path)
    assert "data.jsonl:1: holds a list; write one JSON object per line" in failure("[1]", folder=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 13; save the file as UTF-8"),
        (b'{"index": ' + b"1" * 5000 + b"}", "a number has too many digits; put it in quotes"),
        (b"[" * 100_000, "objects or lists are nested too deep"),
    ],
)
def test_invalid_bytes_are_an_error_with_their_line(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(DatasetError, match=f"data.jsonl:2: {message}"):
        load_prompts(str(tmp_path / "data.jsonl"), ARGUMENTS)


def test_a_surrogate_pair_is_one_character(tmp_path):
    (prompt,) = load_prompts(jsonl(tmp_path, row(1, prompt="\U0001f600")), ARGUMENTS)
    assert prompt.question.text == "\U0001f600"


def test_a_damaged_parquet_file_is_an_error(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(number) for number in range(100)]), path)
    whole = bytearray(path.read_bytes())
    whole[4:64] = b"\xff" * 60
    path.write_bytes(whole)
    with pytest.raises(DatasetError, match="data.parquet: not a parquet file, or a damaged one: "):
        load_prompts(str(path), ARGUMENTS)


def test_an_unreadable_path_is_an_error():
    with pytest.raises(DatasetError, match="cannot be read: File name too long"):
        load_prompts("a" * 300 + ".jsonl", ARGUMENTS)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(DatasetError, match="is a folder; name the files in it"):
        load_prompts(str(tmp_path), ARGUMENTS)


def test_a_byte_order_mark_is_no_content(tmp_path):
    for name, text in (("a.jsonl", json.dumps(row(1))), ("a.json", json.dumps([row(1)]))):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [prompt.id for prompt in load_prompts(str(tmp_path / name), ARGUMENTS)] == ["p1"]


def test_a_missing_column_is_an_error_with_the_existing_columns(tmp_path):
    message = failure({"id": 1, "problem": "q", "answer": "a"}, folder=tmp_path)
    assert "data.jsonl:1: no column 'prompt' or 'messages'; the columns are id, problem, answer: name the" in message
    message = failure({"prompt": "q", "label": "a"}, folder=tmp_path)
    assert "no column 'ground_truth' or 'reward_model.ground_truth' or 'solution'" in message
    assert "the columns are prompt, label" in message


def test_a_prompt_that_only_a_model_scores_needs_no_ground_truth(tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [{"prompt": "Say hello", "tag": "chat"}, {"prompt": "1+1=", "tag": "math", "ground_truth": "2"}]
    file.write_text("\n".join(map(json.dumps, rows)))

    def read_by(own):
        return lambda tag: {"math_rule": (str,)} if tag == own else {}

    prompts = load_prompts(str(file), DataArguments(), read_by("math"))
    assert [prompt.ground_truth for prompt in prompts] == [None, "2"]
    with pytest.raises(DatasetError, match="ground_truth"):
        load_prompts(str(file), DataArguments(), read_by("chat"))


def test_any_json_value_is_a_ground_truth_that_no_rule_reads(tmp_path):
    values = [["a", "b"], {"target": ["a"], "n": None}, True, 5, 0.5, "x"]
    file = jsonl(tmp_path, *(row(number, ground_truth=value) for number, value in enumerate(values)))
    prompts = load_prompts(file, ARGUMENTS, lambda tag: {})
    assert [prompt.ground_truth for prompt in prompts] == [*values[:3], "5", "0.5", "x"]
    with pytest.raises(DatasetError, match=":2: column 'ground_truth' holds a dict; exact_match compares with a text,"):
        load_prompts(file, ARGUMENTS, lambda tag: {"exact_match": (str, int, float, list)})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ""}, "column 'prompt' holds ''"),
        ({"prompt": " \n"}, r"column 'prompt' holds ' \n'; use a text or a list of messages, not empty"),
        ({"prompt": 5}, "column 'prompt' holds 5"),
        (
            {"messages": [{"role": "user"}]},
            "column 'messages' holds {'role': 'user'}; a message has a role and a content, both text",
        ),
        (
            {"messages": [{"role": "human", "content": "Hi"}]},
            "column 'messages' holds the role 'human'; roles are system, user, assistant, tool",
        ),
        ({"ground_truth": None}, "column 'ground_truth' is null; give it a value"),
        ({"ground_truth": ""}, "column 'ground_truth' holds ''; the reward cannot compare a response with it"),
        ({"ground_truth": float("nan")}, "column 'ground_truth' holds nan; the reward cannot compare a response with"),
        ({"id": [1]}, "column 'id' holds a list; an id or a tag is a text or a number"),
        ({"id": None, "uid": {"a": 1}}, "column 'uid' holds a dict; an id or a tag is a text or a number"),
        ({"tag": ["math"]}, "column 'tag' holds a list; an id or a tag is a text or a number"),
        ({"tag": None, "data_source": ["x"]}, "column 'data_source' holds a list; an id or a tag is"),
        ({"id": None, "extra_info": "x"}, "column 'extra_info' holds a str; expected an object, such as {'index': 7}"),
        ({"id": None, "extra_info": [7]}, "column 'extra_info' holds a list; expected an object"),
        ({"prompt": "\ud800"}, r"\ud800 is half of a surrogate pair; add the other half"),
        ({"ground_truth": ["1"]}, "column 'ground_truth' holds a list"),
        ({"ground_truth": True}, "column 'ground_truth' holds a bool"),
    ],
)
def test_an_invalid_value_is_an_error(tmp_path, columns, message):
    assert f"data.jsonl:1: {message}" in failure(row(1, **columns), folder=tmp_path)


def test_rows_with_the_same_id_are_prompts_of_their_own(tmp_path):
    rows = [row(1), row(2), row(1, prompt="2+2="), row(1), row(1, id="p1#3")]
    prompts = load_prompts(jsonl(tmp_path, *rows), ARGUMENTS)
    assert [prompt.id for prompt in prompts] == ["p1", "p2", "p1#2", "p1#4", "p1#3"]
    assert prompts[2].question.text == "2+2="


def test_a_key_that_an_object_has_twice_is_an_error(tmp_path):
    line = '{"prompt": "q", "ground_truth": "a", "extra_info": {"index": 1, "index": 2}}'
    assert "data.jsonl:1: an object has the key 'index' more than once" in failure(line, folder=tmp_path)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    broken = tmp_path / "broken.jsonl"
    broken.symlink_to("/proc/self/mem")  # reading its first byte is an input/output error
    with pytest.raises(DatasetError, match="broken.jsonl: cannot be read: Input/output error"):
        load_prompts(str(broken), ARGUMENTS)
    monkeypatch.setattr("roll.datasets.records.LONGEST_LINE", 2**20)
    with pytest.raises(DatasetError, match="data.jsonl:1: is longer than 1 MiB; write one row per line"):
        load_prompts(jsonl(tmp_path, row(1, prompt="x" * 2**20)), ARGUMENTS)


@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 5),
    counts=st.lists(st.integers(0, 70), max_size=6),
    shuffle=st.booleans(),
)
def test_every_epoch_contains_every_index_once(size, seed, counts, shuffle):
    sampler = PromptSampler(size, seed, shuffle)
    drawn = [index for count in counts for index in sampler.take(count)]
    assert len(drawn) == sum(counts)
    for first in range(0, len(drawn), size):
        part = drawn[first : first + size]
        assert len(set(part)) == len(part)
    assert sampler.epoch == len(drawn) // size


@given(size=st.integers(1, 20), before=st.integers(0, 60), after=st.integers(0, 60), shuffle=st.booleans())
def test_a_resumed_sampler_continues_exactly(size, before, after, shuffle):
    original = PromptSampler(size, 3, shuffle)
    original.take(before)
    resumed = PromptSampler(size, 3, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert resumed.take(after) == original.take(after)


def test_orders_depend_on_seed_and_epoch():
    sampler = PromptSampler(20, 1)
    first, second = sampler.take(20), sampler.take(20)
    assert first != second and PromptSampler(20, 1).take(20) == first != PromptSampler(20, 2).take(20)
    assert PromptSampler(3, 1, shuffle=False).take(5) == [0, 1, 2, 0, 1]


def test_a_state_of_other_data_is_an_error():
    state = PromptSampler(5, 1).state_dict()
    with pytest.raises(ValueError, match="size was 5 and is 6"):
        PromptSampler(6, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptSampler(0, 1)


def test_a_query_follows_the_prompt_and_a_system_message_precedes_it(tmp_path):
    arguments = DataArguments(prompt="instruction", query="input", response="output", system="rules")
    rows = [
        {"instruction": "Add.", "input": "1 and 1", "output": "2", "rules": "Be brief."},
        {"instruction": "Say hello.", "input": "", "output": "hello"},
    ]
    first, second = load_prompts(jsonl(tmp_path, *rows), arguments)
    assert first.question.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add.\n1 and 1"},
    )
    assert second.question == Question(text="Say hello.")
    assert "column 'input' holds 3" in failure({**rows[0], "input": 3}, folder=tmp_path, arguments=arguments)


def test_a_json_file_may_hold_one_list(tmp_path):
    file = tmp_path / "list.json"
    file.write_text(json.dumps([row(1), row(2)], indent=1))
    assert [prompt.id for prompt in load_prompts(str(file), ARGUMENTS)] == ["p1", "p2"]
    file.write_text("[1]")
    with pytest.raises(DatasetError, match="list.json: item 1 of the list is a int; write objects"):
        load_prompts(str(file), ARGUMENTS)


DOMAINS = {"math": [0, 2, 4, 6], "code": [1, 3], "chat": [5]}


@given(shares=st.tuples(*[st.floats(0.01, 1)] * 3), count=st.integers(1, 200))
def test_any_number_of_draws_has_the_share_of_each_domain(shares, count):
    given_shares = dict(zip(DOMAINS, shares, strict=True))
    drawn = MixedSampler(DOMAINS, given_shares, seed=1).take(count)
    for name, indices in DOMAINS.items():
        share = given_shares[name] / sum(shares)
        assert abs(sum(index in indices for index in drawn) - share * count) <= 2


def test_a_domain_without_a_share_is_not_drawn_and_small_domains_repeat():
    drawn = MixedSampler(DOMAINS, {"math": 3, "code": 1, "chat": 0}, seed=1).take(16)
    assert 5 not in drawn
    assert sorted(drawn) == sorted([0, 2, 4, 6] * 3 + [1, 3] * 2)


def test_a_resumed_mixture_continues_exactly():
    shares = {"math": 0.5, "code": 0.3, "chat": 0.2}
    whole = MixedSampler(DOMAINS, shares, seed=3)
    expected = whole.take(30)
    first, second = MixedSampler(DOMAINS, shares, seed=3), MixedSampler(DOMAINS, shares, seed=3)
    start = first.take(11)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + second.take(19) == expected
    with pytest.raises(ValueError, match="use the same domains"):
        MixedSampler(DOMAINS, {"math": 1}, seed=3).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="written with domain_interleave_probs"):
        PromptSampler(7, seed=3).load_state_dict(first.state_dict())


def test_a_domain_without_prompts_cannot_be_drawn():
    with pytest.raises(ValueError, match="no prompts in judge"):
        MixedSampler(DOMAINS, {"math": 0.5, "judge": 0.5}, seed=1)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_a_git_lfs_pointer_is_named(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(DatasetError, match=rf"{name}: is a git-lfs pointer, not the file itself"):
        load_prompts(str(tmp_path / name), DataArguments(), lambda tag: {})
