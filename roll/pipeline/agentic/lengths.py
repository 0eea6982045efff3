"""Whether trajectories fit `sequence_length`, estimated before a run from the episodes of the trial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from roll.configs.agentic import AgenticConfig, CustomEnvConfig, first_messages, turn_message
from roll.configs.errors import Report
from roll.envs.self_test import Played

MARKUP = 8
"""Tokens that a chat template adds to a message and its answer, about."""

ROUND = 128
"""A recommended length is a multiple of this."""


def check_lengths(
    config: AgenticConfig, played: Mapping[str, Played], count: Callable[[str], int], report: Report
) -> None:
    """Warns of environments whose trajectories fill `sequence_length` before their last action.

    Args:
        config: of the run.
        played: an episode of each environment by the path of its entry.
        count: tokens of a text.
        report: gets one warning for each environment.
    """
    length = config.sequence_length or 0
    for tag, entry in config.custom_envs.items():
        episode = played.get(f"custom_envs.{tag}")
        if episode is None or not episode.observations:
            continue
        turns, answer = entry.max_steps or 1, entry.max_tokens_per_step or 0
        first, later = _message_tokens(entry, episode, count)
        needed = first + answer + (turns - 1) * (later + answer)
        if needed > length:
            fitting = max(0, min(turns, 1 + (length - first - answer) // (later + answer)))
            report.warn(
                "sequence_length",
                f"{length} holds {fitting} of the {turns} turns of {tag}, with about {first} tokens in the first "
                f"message, {later} in each later one, and answers of {answer} (max_tokens_per_step); use "
                f"{-(-needed // ROUND) * ROUND}, or less text in agent_template, or a smaller max_steps",
            )


def _message_tokens(entry: CustomEnvConfig, episode: Played, count: Callable[[str], int]) -> tuple[int, int]:
    """Tokens of the first message with the system message, and of the longest one after it."""
    system, template, observations = entry.agent_system_template or "", entry.agent_template, episode.observations
    limits = entry.max_steps or 1, entry.max_tokens_per_step or 0
    first = first_messages(system, template, episode.instruction, observations[0], *limits)
    later = (turn_message(template, turn, text, *limits) for turn, text in enumerate(observations[1:], 1))
    others = itertools.chain(later, [turn_message(template, 1, observations[0], *limits)][: len(observations) == 1])
    return sum(count(each["content"]) + MARKUP for each in first), max(count(text) + MARKUP for text in others)
