"""Pairs of a prompt and the answer to learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.roles import DataArguments
from roll.datasets.conversation import ConversationEncoder
from roll.datasets.prompts import Message, Question, question, record_id, require_unique
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
    """A pair as ids; an answer ends with the tokenizer's end token, so that the model learns to stop.

    Attributes:
        learned: which of `answer_ids` are learned: all, or not those that others said between several answers.
    """

    id: str
    prompt_ids: list[int]
    answer_ids: list[int]
    learned: tuple[bool, ...] | None = None


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
    pairs: Sequence[Pair],
    tokenizer: Any,
    template: str,
    prompt_length: int,
    sequence_length: int,
    mask_history: bool = True,
) -> tuple[list[SFTExample], int]:
    """Encodes pairs and drops those that do not fit.

    Args:
        pairs: what to encode.
        tokenizer: a Hugging Face tokenizer with an end token.
        template: chat template of the question; see `roll.datasets.templates`.
        prompt_length: longest question in tokens.
        sequence_length: longest question and answer together, end token included.
        mask_history: learn the last answer of a conversation only; else each, the question being what precedes the
            first.

    Returns:
        The examples that fit, in order, and how many pairs did not.

    Raises:
        DatasetError: none fits, with the longest lengths seen; the tokenizer has no end token; or as QuestionEncoder.
    """
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end token (eos_token), so no answer could be learnt to end")
    encode = _last_answers if mask_history else _every_answer
    encoded = encode(pairs, tokenizer, template)
    examples = [
        example
        for example in encoded
        if len(example.prompt_ids) <= prompt_length
        and len(example.prompt_ids) + len(example.answer_ids) <= sequence_length
    ]
    if not examples:
        prompts = [len(example.prompt_ids) for example in encoded]
        longest = max((len(example.prompt_ids) + len(example.answer_ids) for example in encoded), default=0)
        raise DatasetError(
            f"none of {len(pairs)} pairs fits prompt_length {prompt_length} and sequence_length {sequence_length}; the "
            f"longest prompt has {max(prompts, default=0)} tokens, the longest pair {longest}"
        )
    return examples, len(pairs) - len(examples)


def _last_answers(pairs: Sequence[Pair], tokenizer: Any, template: str) -> list[SFTExample]:
    encoder = QuestionEncoder(tokenizer, template)
    prompts = encoder.encode([pair.question for pair in pairs])
    answers = encoder.encode_text([pair.answer for pair in pairs])
    return [
        SFTExample(pair.id, prompt, [*answer, tokenizer.eos_token_id])
        for pair, prompt, answer in zip(pairs, prompts, answers, strict=True)
    ]


def _every_answer(pairs: Sequence[Pair], tokenizer: Any, template: str) -> list[SFTExample]:
    chat, encoder = ConversationEncoder(tokenizer, template), QuestionEncoder(tokenizer, template)
    examples = []
    for pair in pairs:
        messages = pair.question.messages or ({"role": "user", "content": pair.question.text or ""},)
        asked: list[Message] = []
        prompt: list[int] = []
        ids: list[int] = []
        learned: list[bool] = []
        for message in [*messages, {"role": "assistant", "content": pair.answer}]:
            if message["role"] != "assistant":
                asked.append(message)
                continue
            between = chat.follow(ids[-1], asked) if prompt else []
            prompt = prompt or chat.start(asked)
            answer = [*encoder.encode_text([message["content"]])[0], tokenizer.eos_token_id]
            ids += [*between, *answer]
            learned += [False] * len(between) + [True] * len(answer)
            asked = []
        examples.append(SFTExample(pair.id, prompt, ids, tuple(learned)))
    return examples


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
