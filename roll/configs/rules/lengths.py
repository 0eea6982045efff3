"""Lengths of prompts and episodes, as far as files of this machine tell them, against the limits of the configuration.

These rules give hints: what they cannot read is left to the rules about files and to the run itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.hub.names import local_file, local_model
from roll.configs.pipeline import BaseConfig, RLVRConfig
from roll.configs.roles import DataArguments

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLED_ROWS = 200
"""Rows of a file whose prompts are measured: read and tokenized in a fraction of a second."""

CHARACTERS_PER_TOKEN = 4
"""Average of English text with a large vocabulary, used without a tokenizer; other texts have more tokens."""

ANSWER_SHARE = 0.5
"""Share of its limit that an answer is taken to have."""

CountTokens = Callable[[str], int]


def check_prompt_lengths(config: BaseConfig, report: Report) -> None:
    """Most prompts fit prompt_length, without counting the template; longer ones are dropped, but not all of them."""
    count = token_counter(config.actor_train.model_args.model_name_or_path)
    if isinstance(config, AgenticConfig) or count is None:
        return
    args = config.actor_train.data_args
    files = [local_file(name) for name in args.file_name]
    lengths = sorted(count(text) for file in files for text in prompts_in(file, args))
    longer = sum(length > config.prompt_length for length in lengths)
    all_longer = 0 < longer == len(lengths) and isinstance(config, RLVRConfig)
    if all_longer and all(has_only_longer_texts(file, args, count, config.prompt_length) for file in files):
        report.error(
            "prompt_length",
            f"{config.prompt_length} drops all {longer} prompts, which have {lengths[0]} to {lengths[-1]} tokens; use "
            f"{fitting_95_percent(lengths)} plus the template's tokens to keep 95 % of them",
        )
    elif lengths and 2 * longer > len(lengths):
        report.warn(
            "prompt_length",
            f"{config.prompt_length} drops {longer} of the first {len(lengths)} prompts, whose median is "
            f"{median(lengths):.0f} tokens; use {fitting_95_percent(lengths)} plus the template's tokens to keep "
            "95 % of them",
        )


def fitting_95_percent(lengths: list[int]) -> int:
    """The length that at least 95 % of these ascending lengths do not exceed."""
    return lengths[math.ceil(0.95 * len(lengths)) - 1]


def check_episode_lengths(config: AgenticConfig, report: Report) -> None:
    """An episode that uses all of its turns fits sequence_length."""
    count = token_counter(config.actor_train.model_args.model_name_or_path)
    whole, tags = config.sequence_length or 0, config.tags_of(config.train_env_manager)
    for tag in tags:
        texts = first_texts(config, tag)
        if texts is None:
            continue
        entry = config.custom_envs[tag]
        rules, observation = (count(text) if count else len(text) // CHARACTERS_PER_TOKEN for text in texts)
        answer, turns = ANSWER_SHARE * (entry.max_tokens_per_step or 0), entry.max_steps or 1
        needed = rules + turns * (observation + answer)
        if needed > whole:
            fitting = max(0, int((whole - rules) // max(observation + answer, 1)))
            report.warn(
                "sequence_length",
                f"{whole} cuts episodes of {tag} after about {fitting} of {turns} turns: rules of {rules} tokens, and "
                f"in each turn an observation of {observation} and an answer of {answer:.0f} (half of "
                f"max_tokens_per_step); use {int(needed) + 1}",
            )


def token_counter(model: str | None) -> CountTokens | None:
    """Counts tokens with the tokenizer of a model folder; None where there is none that can be read."""
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def read_tokenizer(model: str | None) -> Tokenizer | None:
    """The tokenizer.json of a model folder; None where there is none that can be read."""
    file = local_model(model or "") / "tokenizer.json"
    if model is None or not os.path.isfile(file):
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more specific; the run explains a broken tokenizer
        return None


def prompts_in(file: Path, args: DataArguments) -> Iterator[str]:
    """Texts of the first prompts of a JSONL file; rows that cannot be read are skipped."""
    return (text for row in rows_in(file) if (text := prompt_text(row, args)) is not None)


def rows_in(file: Path) -> Iterator[dict[str, Any]]:
    """The first rows of a JSONL file; invalid rows are skipped."""
    if file.suffix != ".jsonl" or not os.path.isfile(file):
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in islice(lines, SAMPLED_ROWS):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def has_only_longer_texts(file: Path, args: DataArguments, count: CountTokens, prompt_length: int) -> bool:
    """Whether every row of a JSONL file was looked at, and is a text with more tokens whatever the template.

    Of messages, which may be JSON in a text, a template may leave a part out.
    """
    if file.suffix != ".jsonl" or not os.path.isfile(file):
        return False
    with file.open("rb") as lines:
        if next(islice(lines, SAMPLED_ROWS, None), None) is not None:
            return False
    texts = [row.get(args.prompt) if row.get(args.messages) is None else None for row in rows_in(file)]
    stripped = [text.strip() if isinstance(text, str) else "" for text in texts]
    return all(not text.startswith("[") and count(text) > prompt_length for text in stripped)


def prompt_text(row: dict[str, Any], args: DataArguments) -> str | None:
    """The prompt of a row, messages joined; None where the row has neither."""
    for column in (args.messages, args.prompt):
        value = row.get(column)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return "\n".join(str(message.get("content", "")) for message in value if isinstance(message, dict))
    return None


def first_texts(config: AgenticConfig, tag: str) -> tuple[str, str] | None:
    """Instruction and first observation of an environment; None where it fails."""
    entry = config.custom_envs[tag]
    make_env: Callable[..., Any] = import_module("roll.envs.registry").make_env
    try:
        env = make_env(entry.env_type, entry.env_config, f"custom_envs.{tag}")
        observation, _ = env.reset(seed=config.seed)
        return str(env.instruction), str(observation)
    except Exception:
        return None
