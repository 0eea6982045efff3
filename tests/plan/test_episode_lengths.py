"""Trajectories that cannot fit are known from an episode, the templates and the tokenizer."""

from __future__ import annotations

import pytest

from roll.base.errors import Report
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import CustomEnvConfig
from roll.plan.episode_lengths import check_lengths
from roll.usercode.env_trial import Played

EPISODE = Played("r" * 100, ("o" * 50, "o" * 50))
"""Texts whose tokens are their characters."""


def warnings(length: int, episode: Played = EPISODE, positions: int | None = None) -> list[str]:
    entry = CustomEnvConfig(max_steps=4, max_tokens_per_step=20, agent_system_template=None)
    entry.agent_template = "{observation}"
    report = Report()
    config = AgenticConfig(custom_envs={"Game": entry}, sequence_length=length)
    check_lengths(config, {"custom_envs.Game": episode}, len, report, positions)
    return [str(warning) for warning in report.warnings]


@pytest.mark.parametrize("episode", [EPISODE, Played("r" * 100, ("o" * 50,))])
def test_the_warning_says_how_many_turns_fit_and_a_length_that_holds_all(episode):
    assert warnings(160, episode)[0].startswith(
        "sequence_length: 160 holds 0 of the 4 turns of Game, with about 151 tok"
    )
    assert "holds 2 of the 4 turns" in warnings(270, episode)[0] and "use 512" in warnings(270, episode)[0]
    assert not warnings(512, episode)
    assert not warnings(151 + 20 + 3 * 70, episode) and warnings(151 + 20 + 3 * 70 - 1, episode)


def test_an_environment_that_was_not_played_is_not_judged():
    assert not warnings(1, Played("", ()))


@pytest.mark.parametrize(
    ("length", "positions", "advice"),
    [
        (270, 500, "; use 500, or less text"),
        (
            270,
            400,
            "; the model has 400 positions; use less text in agent_template, or max_steps 3 with sequence_length",
        ),
        (270, 270, "; the model has 270 positions; use less text in agent_template, or max_steps 2"),
        (160, 160, "; the model has 160 positions; use less text in agent_template"),
    ],
)
def test_no_length_above_the_positions_of_the_model_is_recommended(length: int, positions: int, advice: str):
    [warning] = warnings(length, positions=positions)
    assert advice in warning and ("max_steps" in warning) == (positions > 160)
    assert ("sequence_length 400" in warning) == (positions == 400)
