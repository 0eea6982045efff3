"""The model that the tiny_math recipe creates."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_math.prepare import make_tokenizer, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("model"))


def test_every_character_of_a_problem_is_one_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(string.printable, add_special_tokens=False)
    assert ids == [3 + ord(character) for character in string.printable]
    assert tokenizer.decode(ids) == string.printable


def test_spaces_and_punctuation_survive_decoding(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Ann has 12 apples , gives 5 away.  How many\nare left ? \\boxed{7}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_in_any_alphabet_round_trips() -> None:
    tokenizer = make_tokenizer()
    text = "naïve 数学 ½"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_are_stable() -> None:
    assert make_tokenizer().encode("<|pad|><|end|><|answer|>0") == [0, 1, 2, 51]


def test_chat_template_ends_with_the_answer_marker_and_a_whole_turn_with_the_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "1+2="}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "3"}], tokenize=False)
    assert prompt == "1+2=<|answer|>"
    assert whole == prompt + "3" + tokenizer.eos_token


def test_weights_depend_on_the_seed_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    again = AutoModelForCausalLM.from_pretrained(prepare(tmp_path / "again")).state_dict()
    other = AutoModelForCausalLM.from_pretrained(prepare(tmp_path / "other", seed=1)).state_dict()
    first = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_configuration_names_the_tokens_that_engines_stop_at(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
