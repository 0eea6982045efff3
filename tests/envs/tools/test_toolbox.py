"""Environments with tools: their calls are turns, and never reach the environment's own actions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from gymnasium.utils.env_checker import check_env

from roll.base.errors import ConfigError
from roll.base.schema import option
from roll.envs import EnvConfig, TextEnv, Turn, make_env
from roll.envs.base import episode_metrics
from roll.envs.tools.background import run_on_tool_loop
from roll.sandbox import client

NAME = f"{__name__}:Sums"


class Sums(TextEnv):
    """Says whether an answer is right."""

    METRICS = {"valid": "mean", "success": "last"}

    def rules(self) -> str:
        return "Add."

    def begin(self) -> str:
        self.right = str(self.np_random.integers(100) + self.np_random.integers(100))
        return "How much?"

    def act(self, text: str) -> Turn:
        fine = float(text == self.right)
        return Turn("Right." if fine else "Wrong.", fine, bool(fine), {"valid": 1.0, "success": fine})


@dataclass
class OwnTools(EnvConfig):
    tools: int = option(3, "Hammers.")


class Carpenter(Sums):
    """Has an option of its own with this name."""

    config_class = OwnTools


@pytest.fixture(autouse=True, scope="module")
def no_server_left_behind() -> Iterator[None]:
    async def close() -> None:
        while client._idle:
            client._idle.pop().close()

    yield
    run_on_tool_loop(close())


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def python(code: str) -> str:
    return call("python", code=code)


def answered(text: str, **tools: dict) -> tuple[str, dict[str, float]]:
    env = make_env(NAME, {"tools": tools or {"python": {}}})
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(text)
    env.close()
    assert (reward, terminated, truncated) == (0.0, False, False)
    return observation, info["metrics"]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(2**70)", str(2**70)),
        ("x = 3\nx + 4", "7"),
        ("print('a'); None", "a"),
        ("import sys\nprint('warn', file=sys.stderr)", "warn"),
        ("x = 1", "(nothing was printed)"),
        ("import sys; print(1); sys.exit(3)", "1"),
        ("print(1)\n1/0", "1\nError in line 2: ZeroDivisionError: division by zero"),
        ("def f():\n    return g()\nf()", "Error in line 2: NameError: name 'g' is not defined"),
        ("x = (", "Error in line 1: SyntaxError: '(' was never closed"),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000"),
    ],
)
def test_a_program_answers_as_an_interactive_interpreter(code, result):
    assert answered(python(code)) == (
        f"<tool_response>\n{result}\n</tool_response>", {"tool_calls": 1.0, "tool_errors": 0.0}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [
        ("while True: pass", 0.5, "the program did not end within 0.5 s"),
        ("import os; os._exit(3)", 600.0, "the program was killed; it may use 64 MiB of memory"),
        ("x = ' ' * 10**9", 600.0, "MemoryError"),
        ("print('x' * 3 * 2**20)", 600.0, "the program printed more than 1 MiB"),
    ],
)
def test_a_program_beyond_its_limits_is_an_error_that_the_model_reads(code, seconds, error):
    observation, metrics = answered(python(code), python={"timeout_s": seconds, "memory_limit_mb": 64})
    assert error in observation
    assert metrics["tool_errors"] == float("MemoryError" not in error)


def test_programs_share_no_state():
    env = make_env(NAME, {"tools": {"python": {}}})
    env.reset(seed=1)
    env.step(python("x = 5; open('f', 'w').write('1')"))
    assert "NameError" in env.step(python("x"))[0]
    assert "FileNotFoundError" in env.step(python("open('f')"))[0]


def test_several_calls_are_answered_in_order_and_wrong_ones_with_their_reason():
    text = python("1") + call("pyton", code="2") + call("python") + "<tool_call>{</tool_call>"
    observation, metrics = answered(text)
    results = observation.split("\n</tool_response>\n")
    assert results[0] == "<tool_response>\n1"
    assert results[1].endswith("Error: there is no function pyton; did you mean python? known: python")
    assert results[2].endswith("Error: python takes one argument, the text 'code'")
    assert "the call is no JSON" in results[3]
    assert metrics == {"tool_calls": 4.0, "tool_errors": 3.0}
    observation, metrics = answered(call("f") * 9)
    assert observation.count("there is no function f") == 8 and "only the first 8 calls" in observation
    assert metrics["tool_calls"] == metrics["tool_errors"] == 9.0


def test_a_long_result_is_shortened_in_the_middle():
    observation, _ = answered(python("print('a' * 50 + 'b' * 50)"), python={}, result_characters=20)
    assert f"{'a' * 10}\n... (80 characters are left out) ...\n{'b' * 10}" in observation


def test_metrics_are_those_of_actions_and_of_tools():
    env = make_env(NAME, {"tools": {"python": {}}, "max_steps": 4})
    env.reset(seed=3)
    steps = [env.step(text) for text in ("no", python("1") * 2, python("oops("), "no")]
    assert [step[0] for step in steps][::3] == ["Wrong.", "Wrong."] and steps[-1][3], "calls are turns"
    episode = [step[4]["metrics"] for step in steps]
    assert episode_metrics(env.metric_rules, episode) == {
        "tool_calls": 3.0, "tool_errors": 0.0, "valid": 1.0, "success": 0.0
    }  # fmt: skip
    assert episode_metrics(env.metric_rules, episode[1:2]) == {"tool_calls": 2.0, "tool_errors": 0.0, "success": 0.0}


def test_the_model_reads_the_tools_after_the_rules():
    env = make_env(NAME, {"tools": {"python": {}}})
    assert env.instruction.startswith("Add.\n\n# Tools") and '"name": "python"' in env.instruction
    assert make_env(NAME).instruction == "Add." and make_env(NAME).metric_rules == Sums.METRICS
    check_env(env, skip_render_check=True)


def test_an_environment_with_tools_can_be_pickled():
    env = make_env(NAME, {"tools": {"python": {}}})
    env.reset(seed=3)
    assert "7" in pickle.loads(pickle.dumps(env)).step(python("3 + 4"))[0]


def test_an_option_of_this_name_stays_the_environments_own():
    env = make_env(f"{__name__}:Carpenter", {"tools": 4})
    env.reset(seed=1)
    assert env.config.tools == 4 and env.step(python("1"))[0] == "Wrong."


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (
            {"pyhton": {}},
            "tools.pyhton: unknown tool; did you mean python? known: python, search, mcp, result",
        ),
        ({"python": {"timeout": 3}}, "tools.python.timeout: unknown key; did you mean timeout_s?"),
        ({"python": {"timeout_s": 0}}, "tools.python.timeout_s: 0.0 is too small"),
        ({"search": {}}, "tools.search.files: is empty"),
        ({"search": {"files": "nowhere/*.md"}}, "tools.search.files: nowhere/*.md is no file of "),
        ({"mcp": ["server"]}, "tools.mcp: ['server'] is not a section"),
        ({"mcp": {"clock": {}}}, "tools.mcp.clock.command: is empty"),
        ({"result_characters": 3}, "tools.result_characters: 3 is too small"),
        ([1], "tools: [1] is not a section"),
    ],
)
def test_a_wrong_declaration_is_an_error_with_its_path(tools, expected):
    with pytest.raises(ConfigError) as caught:
        make_env(NAME, {"tools": tools}, "custom_envs.Sums")
    assert f"custom_envs.Sums.env_config.{expected}" in str(caught.value)
