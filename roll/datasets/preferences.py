"""Pairs of a better and a worse response to one prompt (data of DPO and of reward models), as text and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.configs.arguments import DataArguments
from roll.datasets.prompts import Message, Question, answer, question, record_id, with_unique_ids
from roll.datasets.records import DatasetError, Record, read_records
from roll.datasets.sft import PromptResponse, SFTExample, encode_last_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preference:
    """A prompt with the response that is preferred and the one that is not."""

    id: str
    question: Question
    chosen: str | Message
    rejected: str | Message


@dataclass(frozen=True)
class PreferencePair:
    """Both responses of a prompt as token ids."""

    chosen: SFTExample
    rejected: SFTExample

    @property
    def tokens(self) -> int:
        return max(len(one.prompt_ids) + len(one.response_ids) for one in (self.chosen, self.rejected))


def load_preferences(files: str | list[str], data_args: DataArguments) -> list[Preference]:
    """Reads the pairs of all files, in order.

    The columns `data_args.chosen` and `data_args.rejected` have a text each, or messages that end with the assistant's.
    The prompt is what precedes the last of these messages, the same in both; of texts, or of a single message, it is
    that of `data_args.prompt` or `data_args.messages`. Pairs of two equal responses are left out.

    Raises:
        DatasetError: as `load_prompts`.
    """
    pairs = with_unique_ids([read_preference(record, data_args) for record in read_records(files)])
    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    if not different:
        raise DatasetError(f"all {len(pairs)} pairs have two equal responses, so none is preferred")
    return different


def read_preference(record: Record, data_args: DataArguments) -> Preference:
    """The pair of one row; see `load_preferences`."""
    before, chosen = answer(record, data_args.chosen, "chosen")
    before_rejected, rejected = answer(record, data_args.rejected, "rejected")
    if before and before_rejected and before != before_rejected:
        record.fail(f"columns {data_args.chosen!r} and {data_args.rejected!r} answer different messages")
    asked = question(record, data_args, before or before_rejected)
    last = asked.messages[-1] if asked.messages else {"role": "user"}
    if last["role"] == "assistant" and last["content"] in (chosen, rejected):
        record.fail("the prompt ends with a message of the assistant that is one of the answers; leave it out")
    return Preference(record_id(record, data_args), asked, chosen, rejected)


def encode_preferences(
    pairs: Sequence[Preference],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    prompt_length: int,
    sequence_length: int,
    appended: int = 0,
    variables: Mapping[str, Any] | None = None,
) -> tuple[list[PreferencePair], int]:
    """Encodes both responses of each pair with the tokenizer's end token, and drops pairs that are too long.

    `sequence_length` bounds prompt and response together with the end token, and `appended` tokens that follow each
    response in a batch.

    Returns:
        The pairs that fit, in order, and the number that were dropped.

    Raises:
        DatasetError: none fits (the message gives the longest lengths), or the tokenizer has no end token.
    """
    encoded = [
        encode_last_messages(
            [PromptResponse(pair.id, pair.question, getattr(pair, key)) for pair in pairs],
            tokenizer,
            template,
            variables,
        )
        for key in ("chosen", "rejected")
    ]
    both = [PreferencePair(*one) for one in zip(*encoded, strict=True)]
    longest_pair = sequence_length - appended
    kept = [pair for pair in both if len(pair.chosen.prompt_ids) <= prompt_length and pair.tokens <= longest_pair]
    if not kept:
        prompts = max((len(pair.chosen.prompt_ids) for pair in both), default=0)
        longest = max((pair.tokens + appended for pair in both), default=0)
        raise DatasetError(
            f"none of {len(pairs)} pairs fits prompt_length {prompt_length} and sequence_length {sequence_length}; the "
            f"longest prompt has {prompts} tokens, the longest prompt with a response {longest}"
        )
    return kept, len(both) - len(kept)
