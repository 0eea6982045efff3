"""The recipe of the agent of smolagents: its files plan, and one token of its code decides whether it guesses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples.tiny_agent.demo import warm_inputs
from examples.tiny_agent.episodes import write_episodes
from examples.tiny_agent.model import make_model
from examples.tiny_agent.problems import problem
from examples.tiny_smolagents.demo import CALL, END_CALL, END_GUESS, GUESS, WARM, conversation
from roll.datasets.tokenizer import load_tokenizer
from roll.loading.load import load_config
from roll.plan.check_inputs import check_inputs
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), words=(CALL, END_CALL, GUESS, END_GUESS))


def test_the_run_plans_without_a_warning(model: Path) -> None:
    """Of the program only whether it is there is checked; an integration test runs it."""
    command = json.dumps([sys.executable, "-m", "examples.tiny_smolagents.solver", "{seed}"])
    overrides = [f"pretrain={model}", f"custom_envs.Solver.command={command}"]
    config = load_config(EXAMPLES / "tiny_smolagents" / "agent_config.yaml", overrides)
    assert make_plan(config, LAPTOP).warnings == [] == prepare_run(config, LAPTOP)


def test_the_warm_start_plans_with_the_written_episodes(model: Path, tmp_path: Path) -> None:
    data = write_episodes(tmp_path, 1, 200, 2, conversation, [])
    config = load_config(EXAMPLES / "tiny_agent" / "sft_config.yaml", [*warm_inputs(model, data), *WARM])
    report = check_inputs(config)
    assert [*report.errors, *report.warnings, *report.missing] == [] == prepare_run(config, LAPTOP)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_token_of_the_code_decides_whether_the_tool_is_called(model: Path, seed: int) -> None:
    tokenizer = load_tokenizer(str(model))
    question, _ = problem(seed)
    [_, call], [_, guess] = (conversation(seed, guesses) for guesses in (False, True))
    texts = [[tokenizer.decode(token) for token in tokenizer.encode(each["content"])] for each in (call, guess)]
    assert texts[0] == [CALL, *question, END_CALL]
    assert [texts[1][0], texts[1][-1]] == [GUESS, END_GUESS] and "".join(texts[1][1:-1]).isdecimal()
