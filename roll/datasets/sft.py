"""Pairs of a prompt and the answer to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.arguments import DataArguments
from roll.datasets.prompts import Question, question, record_id, require_unique
from roll.datasets.records import DatasetError, Record, read_records
from roll.datasets.templates import QuestionEncoder


@dataclass(frozen=True)
class Pair:
    """A question and the answer the model should give."""

    id: str
    question: Question
    answer: str


@dataclass(frozen=True)
class SFTExample:
    """A pair as ids; the answer ends with the tokenizer's end token, so that the model learns to stop."""

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]


def load_pairs(files: str | list[str], data_args: DataArguments) -> list[Pair]:
    """Pairs of all files, in order.

    The answer is the column `data_args.response`; where it is missing and the messages end with the assistant's, it
    is that message.

    Raises:
        DatasetError: as `load_prompts`.
    """
    records = read_records(files)
    pairs = [_pair(record, data_args) for record in records]
    require_unique([pair.id for pair in pairs], records)
    return pairs


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Any, template: str, prompt_length: int, sequence_length: int
) -> tuple[list[SFTExample], int]:
    """Encodes pairs and drops those that do not fit.

    Args:
        pairs: what to encode.
        tokenizer: a Hugging Face tokenizer with an end token.
        template: chat template of the question; see `roll.datasets.templates`.
        prompt_length: longest question in tokens.
        sequence_length: longest question and answer together, end token included.

    Returns:
        The examples that fit, in order, and how many pairs did not.

    Raises:
        DatasetError: none fits, with the longest lengths seen; the tokenizer has no end token; or as QuestionEncoder.
    """
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end token (eos_token), so no answer could be learnt to end")
    encoder = QuestionEncoder(tokenizer, template)
    prompts = encoder.encode([pair.question for pair in pairs])
    answers = [ids + [tokenizer.eos_token_id] for ids in encoder.encode_text([pair.answer for pair in pairs])]
    examples = [
        SFTExample(pair.id, prompt, answer)
        for pair, prompt, answer in zip(pairs, prompts, answers, strict=True)
        if len(prompt) <= prompt_length and len(prompt) + len(answer) <= sequence_length
    ]
    if not examples:
        longest = max((len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)), default=0)
        raise DatasetError(
            f"none of {len(pairs)} pairs fits prompt_length {prompt_length} and sequence_length {sequence_length}; the "
            f"longest prompt has {max(map(len, prompts), default=0)} tokens, the longest pair {longest}"
        )
    return examples, len(pairs) - len(examples)


def _pair(record: Record, data_args: DataArguments) -> Pair:
    asked, answer = question(record, data_args), record.row.get(data_args.response)
    messages = asked.messages or ()
    if answer is None and len(messages) > 1 and messages[-1]["role"] == "assistant":
        asked, answer = Question(messages=messages[:-1]), messages[-1]["content"]
    if answer is None:
        record.fail_missing(data_args.response)
    if not isinstance(answer, str):
        record.fail(f"column {data_args.response!r} holds a {type(answer).__name__}; the answer is a text")
    return Pair(record_id(record, data_args), asked, answer)
