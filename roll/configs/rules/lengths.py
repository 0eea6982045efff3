"""Lengths of episodes, as far as files of this machine tell them, against the limits of the configuration.

These rules give hints: what they cannot read is left to the rules about files and to the run itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from roll.configs.agentic import AgenticConfig
from roll.configs.errors import Report
from roll.configs.hub.names import local_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN = 4
"""Average of English text with a large vocabulary, used without a tokenizer; other texts have more tokens."""

ANSWER_SHARE = 0.5
"""Share of its limit that an answer is taken to have."""

CountTokens = Callable[[str], int]


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
