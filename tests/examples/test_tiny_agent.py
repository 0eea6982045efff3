"""The recipe of the agent: its files plan, and the model's example episodes are those that the agent would have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny_agent.demo import warm_inputs
from examples.tiny_agent.episodes import CALL, END_CALL, conversation, write_episodes
from examples.tiny_agent.model import make_model
from examples.tiny_agent.problems import calculator, problem
from examples.tiny_agent.solver import TOOLS, run_tool
from roll.datasets.templates import ConversationEncoder
from roll.datasets.tokenizer import load_tokenizer
from roll.gateway.tool_parsers import hermes
from roll.loading.load import load_config
from roll.plan.hardware import prepare_run
from roll.plan.plan import make_plan
from tests.configs.samples import LAPTOP

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_agent"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_the_run_of_the_agent_plans_without_a_warning(model: Path) -> None:
    config = load_config(FOLDER / "agent_config.yaml", [f"pretrain={model}"])
    plan = make_plan(config, LAPTOP)
    assert plan.warnings == [] == prepare_run(config, LAPTOP)


def test_the_warm_start_plans_with_the_written_episodes(model: Path, tmp_path: Path) -> None:
    data = write_episodes(tmp_path, seed=1, train=3, val=2)
    config = load_config(FOLDER / "sft_config.yaml", warm_inputs(model, data))
    assert prepare_run(config, LAPTOP) == []


@pytest.mark.parametrize("seed", range(20))
def test_an_episode_without_guesses_calls_the_tool_and_gives_its_result(seed: int) -> None:
    _, call, result, answer = conversation(seed, guesses=False)
    [(name, arguments)] = hermes(call["content"], TOOLS).calls
    assert (name, run_tool(json.dumps(arguments))) == ("calculator", result["content"])
    assert answer["content"] == result["content"] == problem(seed)[1]
    assert len(conversation(seed, guesses=True)) == 2


def test_what_the_tool_does_not_read_is_an_error() -> None:
    texts = ("12", "12*", "1*x", "1" * 30 + "*2", "2*3*4")
    assert [calculator(text) for text in texts] == ["error"] * len(texts)
    assert [run_tool(text) for text in ("", "[]", "{}", '{"expression": 5}')] == ["error"] * 4


def test_the_template_lets_a_conversation_grow_and_shows_tools_and_calls(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    chat = ConversationEncoder(tokenizer, "native")
    started = chat.start([{"role": "user", "content": "12*34="}], TOOLS)
    assert tokenizer.decode(started) == "calculator 12*34=<|answer|>"
    assert tokenizer.encode(f"{CALL}1*2{END_CALL}", add_special_tokens=False)[1:-1] == tokenizer.encode("1*2")
    followed = chat.follow(tokenizer.eos_token_id, [{"role": "tool", "content": "408"}], TOOLS)
    assert tokenizer.decode(followed) == "408<|answer|>"
