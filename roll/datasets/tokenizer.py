"""The tokenizer of a HF model folder, and the data and sampling parameters that depend on it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.base.errors import RunError
from roll.configs.arguments import DataArguments
from roll.configs.run_options import DataOptions
from roll.datasets.preferences import encode_preferences
from roll.datasets.sft import encode_sft_data
from roll.datasets.stop_strings import text_until_stop
from roll.datasets.templates import ConversationEncoder, encode_prompts, template_variables
from roll.hub.names import local_model

PAIRS = ("dpo", "reward_model")
"""Pipelines that learn from pairs of responses."""


def load_tokenizer(folder: str | None) -> PreTrainedTokenizerBase:
    """Reads the tokenizer in a model folder.

    Raises:
        RunError: pretrain is not set, or the folder has no tokenizer, or the tokenizer has no end-of-sequence token.
    """
    if folder is None:
        raise RunError("pretrain is not set; set it to a HF model folder or to owner/name on the hub")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(local_model(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise RunError(f"{folder}: transformers cannot read a tokenizer from it: {error}") from error
    if tokenizer.eos_token_id is None:
        raise RunError(f"{folder}: its tokenizer has no eos_token, so no response could end")
    return tokenizer


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    stop_strings: Sequence[str] = (),
    stop_token_ids: Collection[int] = (),
) -> str:
    """The text of a response as the model wrote it, without the special tokens that end it.

    These are `stop_token_ids`, the tokenizer's eos and pad token, and the eos tokens in generation_config.json of its
    folder. Other special tokens, such as tags, stay, and so does a stop token that is none. What the last token has
    after one of `stop_strings` is left out as well.
    """
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids, *_ends_of_model(tokenizer.name_or_path)}
    hidden = {each for each in ends.intersection(ids) if not tokenizer.decode([each], skip_special_tokens=True)}
    text, *before = (
        str(tokenizer.decode([each for each in part if each not in hidden]))
        for part in ([ids, ids[:-1]] if stop_strings else [ids])
    )
    return text_until_stop(text, stop_strings, after=len(before[0].rstrip("\ufffd"))) if before else text


@cache
def _ends_of_model(folder: str) -> tuple[int, ...]:
    try:
        found = json.loads((Path(folder) / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)


def encode_data(
    options: DataOptions, args: DataArguments, data: Sequence[Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Any], int]:
    """Encodes the data of a role as its pipeline learns them; returns those that fit and the number of longer ones.

    Raises:
        DatasetError: none fits, or the chat template cannot be applied.
    """
    variables = template_variables(args.template_kwargs, options.template_time)
    lengths = (options.prompt_length, options.sequence_length or 0)
    if options.pipeline == "sft":
        return encode_sft_data(data, tokenizer, args.template, *lengths, args.mask_history, variables)
    if options.pipeline in PAIRS:
        appended = int(options.pipeline == "reward_model")  # padding, where the value of a sequence is read
        return encode_preferences(data, tokenizer, args.template, *lengths, appended, variables)
    return encode_prompts(data, tokenizer, args.template, options.prompt_length, variables)


def token_lengths(options: DataOptions, encoded: Sequence[Any]) -> list[tuple[int, int]]:
    """Tokens of the prompt of each example, and of both prompt and (longer) response where responses are learned."""
    if options.pipeline == "sft":
        return [(len(one.prompt_ids), len(one.prompt_ids) + len(one.response_ids)) for one in encoded]
    if options.pipeline in PAIRS:
        return [(len(one.chosen.prompt_ids), one.tokens + (options.pipeline == "reward_model")) for one in encoded]
    return [(len(one.ids), len(one.ids)) for one in encoded]


def conversation_encoder(
    options: DataOptions, args: DataArguments, tokenizer: PreTrainedTokenizerBase
) -> ConversationEncoder:
    """Converts the messages of training and validation.

    Raises:
        DatasetError: the chat template does not let turns be added one by one.
    """
    variables = template_variables(args.template_kwargs, options.template_time)
    chat = ConversationEncoder(tokenizer, args.template, variables)
    chat.follow(tokenizer.eos_token_id, [{"role": "user", "content": "next"}])
    return chat
