"""Whether trajectories fit `sequence_length`, estimated before a run from the episodes of the trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from roll.base.errors import Report
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import first_messages, turn_message
from roll.usercode.env_trial import Played

MARKUP = 8
"""Tokens that a chat template adds to a message and its answer, at most in most; only a recommended length has them."""

ROUND = 128
"""A recommended length is a multiple of this."""


def check_lengths(
    config: AgenticConfig,
    played: Mapping[str, Played],
    count: Callable[[str], int],
    report: Report,
    positions: int | None = None,
) -> None:
    """Warns of environments whose trajectories fill `sequence_length` before their last action.

    `played` has an episode of each environment by the path of its entry, `count` gives the tokens of a text, and
    `positions` are those of the model, if known: no longer sequence is recommended.
    """
    length = config.sequence_length or 0
    for tag, entry in config.custom_envs.items():
        episode = played.get(f"custom_envs.{tag}")
        if episode is None or not episode.observations:
            continue
        limits = turns, answer = entry.max_steps or 1, entry.max_tokens_per_step or 0
        system, template, observations = entry.agent_system_template or "", entry.agent_template, episode.observations
        messages = first_messages(system, template, episode.instruction, observations[0], *limits)
        first = sum(count(message["content"]) for message in messages)
        others = enumerate(observations[1:] or observations, 1)  # of an episode of one turn the same text again
        later = max(count(turn_message(template, turn, text, *limits)) for turn, text in others)
        needed = first + answer + (turns - 1) * (later + answer)
        if needed > length:
            whole = needed + MARKUP * (turns + 1)
            works = -(-whole // ROUND) * ROUND
            use = f"use {min(works, positions or works)}, or less text in agent_template, or a smaller max_steps"
            if positions is not None and whole > positions:
                steps = 1 + (positions - first - answer - 2 * MARKUP) // (later + answer + MARKUP)
                fewer = f", or max_steps {steps}" if steps > 0 else ""
                longer = f" with sequence_length {positions}" if steps > 0 and length < positions else ""
                use = f"the model has {positions} positions; use less text in agent_template{fewer}{longer}"
            fitting = max(0, min(turns, 1 + (length - first - answer) // (later + answer)))
            report.warn(
                "sequence_length",
                f"{length} holds {fitting} of the {turns} turns of {tag}, with about {first} tokens in the first "
                f"message, {later} in each later one, and answers of {answer} (max_tokens_per_step); {use}",
            )
