"""Templates of agents hold the fields they may, and the observation."""

from __future__ import annotations

import pytest

from roll.configs.agentic import SYSTEM_TEMPLATE, TURN_FIELDS, TURN_TEMPLATE, system_template, turn_template


def test_the_default_texts_pass_their_own_checks() -> None:
    assert system_template(SYSTEM_TEMPLATE) == SYSTEM_TEMPLATE
    assert turn_template(TURN_TEMPLATE) == TURN_TEMPLATE


def test_the_default_turn_says_what_is_seen_and_what_is_left() -> None:
    values = {name: f"<{name}>" for name in TURN_FIELDS}
    said = TURN_TEMPLATE.format(**values)
    assert all(values[name] in said for name in ("turn_idx", "observation", "actions_left", "max_response_length"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{observation} {reward}", "{reward} is not a field; known: {turn_idx}, {observation}, {actions_left}, "),
        ("{observation.secret}", "{observation.secret} is not a field"),
        ("{}", "{} is not a field"),
        ("{observation", "braces do not match"),
        ("no field", "does not contain {observation}"),
        ("{{observation}}", "does not contain {observation}"),
    ],
)
def test_what_a_turn_may_not_hold(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        turn_template(text)
    assert said in str(caught.value)


def test_the_system_message_knows_no_turn() -> None:
    with pytest.raises(ValueError, match="{observation} is not a field; known: {env_instruction}; write {{ and }} for"):
        system_template("{observation}")
    assert system_template('{env_instruction} Answer {{"move": 1}}.')


def test_what_is_no_text_is_left_to_the_type_check() -> None:
    assert system_template(5) == turn_template(5) == 5
