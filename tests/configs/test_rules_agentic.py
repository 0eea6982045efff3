"""Messages of the rules of the agentic pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.configs.check import check
from roll.configs.environments import names_class
from tests.configs.samples import AGENTIC, agentic, refusal

TRAIN = "train_env_manager"


@pytest.mark.parametrize(
    ("env_type", "is_class"),
    [
        *((name, False) for name in ("game:GuessTheNumber-v0", "rg:letter_counting", "math:ASDiv2K", "code:Taco8k")),
        *((name, False) for name in ("qa:HotpotQA", "logic:RuleTaker-d0", "eval:MATH500", "ale_py:ALE/Pong-v5")),
        *(
            (name, True)
            for name in ("guess_env:Guess", "no_such_module:Shop", "my.games:Chess", "game.py:Chess", "g.py")
        ),
        *((name, False) for name in ("frozen_lake", "roll/Sokoban-v0")),
    ],
)
def test_an_id_of_another_library_is_not_a_class_of_the_user(env_type: str, is_class: bool) -> None:
    assert names_class(env_type) == is_class


def test_a_module_of_the_user_may_have_the_name_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "game.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert names_class("game:Chess") and not names_class("game:Chess-v0")


def test_at_least_one_environment_is_required(tmp_path: Path) -> None:
    text = AGENTIC[: AGENTIC.index("custom_envs")] + "custom_envs: {}\n" + AGENTIC[AGENTIC.index("actor_train") :]
    assert "custom_envs: is empty, so there is no environment" in refusal(tmp_path, text=text)


def test_group_size_one_is_allowed_without_comparison(tmp_path: Path) -> None:
    config = agentic(tmp_path, f"{TRAIN}.group_size=1", "adv_estimator=reinforce")
    assert config.num_return_sequences_in_group == 1


def test_an_environment_that_is_not_here_stops_a_run_and_not_a_plan(tmp_path: Path) -> None:
    report = check(agentic(tmp_path, "custom_envs.Lake.env_type=bfcl"))
    assert not report.errors
    [problem] = [problem for problem in report.missing if problem.path == "custom_envs.Lake.env_type"]
    assert problem.message.startswith("bfcl is not an environment of this project; known: frozen_lake, sokoban")
