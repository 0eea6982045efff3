"""Tokenizer, stop strings, chat template and lengths are tried on the first rows before a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from roll.base.errors import Report
from roll.configs.pipeline import RLVRConfig
from roll.datasets.prompts import Prompt, Question
from roll.plan import token_trial
from roll.plan.token_trial import first_items, try_rows, try_tokenizers, try_tokens
from tests.configs.samples import agentic, rlvr

SYSTEM = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="})


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(str(index), "t", Question(text="1" * length), "1") for index, length in enumerate(lengths)]


def texts(report: Report) -> list[str]:
    return [str(problem) for problem in [*report.errors, *report.warnings]]


@pytest.fixture
def model(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A copy of the tiny model whose tokenizer may be changed."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def config(model: Path, *overrides: str) -> RLVRConfig:
    return rlvr(model.parent, f"pretrain={model}", "prompt_length=12", "response_length=8", *overrides)


def change(model: Path, **values: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(values.pop("tokens", []))
    for name, value in values.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(model)


@pytest.fixture(autouse=True)
def unread() -> None:
    """Tokenizers are read anew."""
    token_trial._tokenizer.cache_clear()


def test_a_sound_configuration_has_no_findings(model: Path) -> None:
    found = try_tokens(config(model), {"actor_train": (prompts(3, 4), True)})
    assert texts(found) == []


def test_more_tokens_than_rows_of_the_embedding_are_an_error(model: Path) -> None:
    change(model, tokens=["<a>", "<b>", "<c>"])
    [error] = texts(try_tokenizers(config(model)))
    assert error.startswith(f"pretrain: {model} has tokens up to id 261, but vocab_size 259 in config.json; resize")


def test_a_stop_string_may_be_one_token_or_several(model: Path) -> None:
    for stop in ("</answer>", "x"):
        assert texts(try_tokenizers(config(model, f"actor_infer.generating_args.stop_strings=[{stop}]"))) == []


def test_turns_of_agents_are_tried(model: Path) -> None:
    change(model, chat_template="{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    [error] = texts(try_tokenizers(agentic(model.parent, f"pretrain={model}", "sequence_length=512")))
    assert "renders earlier turns differently" in error


def test_a_template_that_refuses_a_row_is_reported_with_the_row(model: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    change(model, chat_template=refuses + "{{ messages[-1].content }}")
    asked = Prompt("b", "t", Question(messages=SYSTEM, source="train.jsonl:2"), "1")
    [error] = texts(try_rows(config(model), "actor_train", [*prompts(3), asked], True))
    assert error == "actor_train.data_args: train.jsonl:2: the chat template fails, line 1: no system message"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}"
         "{% endfor %}", "took longer than 3 s; correct the chat template"),
        ("{{ 'x' * 5 * 10 ** 9 }}", "the chat template fails, line 1: MemoryError"),
    ],
    ids=["endless", "large"],
)  # fmt: skip
def test_a_template_without_end_is_an_error(
    model: Path, template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_trial, "TIMEOUT_S", 3.0)
    change(model, chat_template=template)
    [error] = texts(try_tokens(config(model), {"actor_train": (prompts(3), True)}))
    assert message in error


LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("version https://git-lfs.github.com/spec/v1", "1 (system)"),
        (LOOP.replace("messages %", "messages if m.role != 'system' %"), "1 (system)"),
        (LOOP.replace("messages", "messages[-1:]"), "1 (system)"),
        (LOOP.replace("m.content", "m.content[:3]"), "1 (system)"),
        (LOOP.replace("messages", "messages[:1]"), "2 (user)"),
    ],
)
def test_a_template_that_leaves_out_a_message_is_an_error(model: Path, template: str, message: str) -> None:
    change(model, chat_template=template)
    asked = Prompt("b", "t", Question(messages=SYSTEM, source="train.jsonl:2"), "1")
    [error] = texts(try_rows(config(model), "actor_train", [asked], True))
    assert error.startswith(
        f"actor_train.data_args: train.jsonl:2: the chat template leaves out message {message}, or its end"
    )


@pytest.mark.parametrize("content", ["m.content | trim", "m.content.split('</think>')[-1]", "m.content | upper"])
def test_a_template_may_trim_messages_and_drop_thoughts(model: Path, content: str) -> None:
    change(model, chat_template=LOOP.replace("m.content", content))
    answer = {"role": "assistant", "content": "<think>hm</think> 2 \n"}
    asked = Prompt("b", "t", Question(messages=(*SYSTEM, answer, {"role": "user", "content": " \n"}, SYSTEM[1])), "1")
    assert texts(try_rows(config(model, "prompt_length=500"), "actor_train", [asked], True)) == []


@pytest.mark.parametrize("chance", ["{{ range(9999) | random }}", "{{ [1, 1]|random }}", "{{ lipsum(1)[:0] }}"])
def test_a_template_that_draws_at_random_is_an_error(model: Path, chance: str) -> None:
    change(model, chat_template=LOOP + chance)
    [error] = texts(try_rows(config(model, "prompt_length=500"), "actor_train", prompts(3), True))
    assert error.startswith("actor_train.data_args.template: renders the same rows differently each time")


def test_a_variable_that_the_template_does_not_read_is_a_warning(model: Path) -> None:
    given = config(model, "actor_train.data_args.template_kwargs={enable_thinking: false}")
    [warning] = texts(try_rows(given, "actor_train", prompts(3), True))
    assert warning.endswith("template_kwargs: the chat template does not read enable_thinking")


def test_a_prompt_length_that_drops_most_rows_is_told_with_one_that_fits(model: Path) -> None:
    given = config(model, "actor_train.data_args.template=none")
    assert texts(try_rows(given, "actor_train", prompts(3, 12, 13, 14), True)) == []
    [warning] = texts(try_rows(given, "actor_train", prompts(3, 13, 14), True))
    assert warning == (
        "prompt_length: drops 2 of the first 3 rows: they are longer than prompt_length 12, where they have 3 to 14 "
        "tokens and 14 keeps 95%"
    )


def test_a_prompt_length_that_drops_all_rows_is_refused_where_all_were_seen(model: Path) -> None:
    given = config(model, "actor_train.data_args.template=none")
    [problem] = try_rows(given, "actor_train", prompts(13, 14), True).errors
    assert str(problem).startswith("prompt_length: drops all 2 rows: they are longer than prompt_length 12")
    [warning] = try_rows(given, "actor_train", prompts(13, 14), False).warnings
    assert str(warning).endswith("; the run ends if it drops the others too")


def test_a_bounded_number_of_rows_is_tried() -> None:
    assert len(first_items(prompts(*[3] * 5_000))) == token_trial.TRIED_ROWS
    assert len(first_items(prompts(*[100_000] * 9))) == 1 == len(first_items(prompts(10**6)))
