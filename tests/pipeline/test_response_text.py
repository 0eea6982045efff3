"""What rewards, environments and dumps read of the tokens that a model sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.datasets.tokenizer import response_text

WORDS = ["<eos>", "<pad>", "<think>", "</think>", "<answer>", "</answer>", "<end>", "<other end>", "14", "12+2", "\n"]
THINK, THOUGHT, ANSWER, ANSWERED, EOS, PAD, END, OTHER_END = (
    WORDS.index(word)
    for word in ("<think>", "</think>", "<answer>", "</answer>", "<eos>", "<pad>", "<end>", "<other end>")
)
SUM, RESULT, LINE = WORDS.index("12+2"), WORDS.index("14"), WORDS.index("\n")
RESPONSE = [THINK, SUM, THOUGHT, ANSWER, RESULT, ANSWERED]
TEXT = "<think> 12+2 </think> <answer> 14 </answer>"


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    base = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="14"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": WORDS[2:8]})
    made.name_or_path = str(folder)
    return made


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (RESPONSE, TEXT),
        ([*RESPONSE, EOS], TEXT),
        ([*RESPONSE, EOS, PAD, PAD], TEXT),
        ([*RESPONSE, END], TEXT),
        ([*RESPONSE, OTHER_END], TEXT),
        ([*RESPONSE, LINE], f"{TEXT} \n"),
        ([THINK, SUM, PAD, *RESPONSE[2:]], TEXT),
        ([EOS], ""),
        ([], ""),
    ],
)
def test_only_the_tokens_that_end_a_response_are_left_out(ids, text, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_END]}))
    assert response_text(tokenizer(tmp_path), ids, stop_token_ids=[END, LINE]) == text


def test_a_folder_without_a_generation_config_has_the_ends_of_its_tokenizer(tmp_path):
    assert response_text(tokenizer(tmp_path), [*RESPONSE, OTHER_END, EOS]) == f"{TEXT} <other end>"


def test_the_text_ends_with_the_first_stop_string(tmp_path):
    ids = [THINK, SUM, THOUGHT, SUM]
    assert response_text(tokenizer(tmp_path), ids, ("12+",)) == "<think> 12+2 </think> 12+"
    assert response_text(tokenizer(tmp_path), ids, ("never",)) == "<think> 12+2 </think> 12+2"


def test_what_a_hidden_token_separates_is_no_stop_string(tmp_path):
    """The engine searches the text with all tokens, so the response went on."""
    ids = [THINK, PAD, SUM, RESULT, ANSWERED]
    assert response_text(tokenizer(tmp_path), ids, ("> 12",)) == "<think> 12+2 14 </answer>"
