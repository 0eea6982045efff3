"""Servers of MCP as tools: real servers, in processes that end with the environment."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll.base.errors import ConfigError
from roll.envs import make_env
from tests.envs.tools.test_toolbox import NAME, call
from tests.processes import PATIENCE_S

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
ENVIRONMENT = {"OWNER": "tests", "PYTHONPATH": ":".join(sys.path)}


def with_server(**options: Any) -> Any:
    server = {"command": SERVER, "env": ENVIRONMENT, **options}
    env = make_env(NAME, {"tools": {"mcp": {"own": server}}})
    env.reset(seed=1)
    return env


def servers() -> list[psutil.Process]:
    """Servers that run; one that has ended may not be waited for yet."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a ZombieProcess is one
            if SERVER[1] in child.cmdline():
                found.append(child)
    return found


def wait_until_none_is_left() -> None:
    until = time.monotonic() + PATIENCE_S
    while servers():
        assert time.monotonic() < until, servers()
        time.sleep(0.05)


def test_its_functions_are_called_and_it_ends_with_its_environment():
    first, second = with_server(), with_server()
    assert servers() == [], "they start when they are first used"
    schemas = [json.loads(line) for line in first.instruction.splitlines() if line.startswith('{"type"')]
    assert [each["function"]["name"] for each in schemas] == ["add", "count", "fail", "sleep", "die"]
    assert schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    observation, reward, *_, info = first.step(call("add", a=2, b=40))
    assert (observation, reward) == ("<tool_response>\n42\n</tool_response>", 0.0)
    assert info["metrics"] == {"tool_calls": 1.0, "tool_errors": 0.0}
    assert "1 of tests" in first.step(call("count"))[0] and "2 of tests" in first.step(call("count"))[0]
    assert "1 of tests" in second.step(call("count"))[0], "each episode has a server of its own"
    assert len(servers()) == 2
    first.close()
    del second  # as an environment that has raised
    wait_until_none_is_left()


def test_what_fails_is_read_by_the_model_and_a_server_that_ends_is_raised():
    env = with_server()
    observation, *_, info = env.step(call("fail", city="Rome") + call("add", a="x") + call("nothing"))
    assert observation.count("Error: ") == 3 and info["metrics"] == {"tool_calls": 3.0, "tool_errors": 3.0}
    assert "there is no function nothing; known: add, count" in observation
    with pytest.raises(Exception, match="Connection closed"):
        env.step(call("die"))
    env.close()
    wait_until_none_is_left()


def test_a_call_that_takes_too_long_is_an_error_and_the_server_lives_on():
    env = with_server()
    assert "42" in env.step(call("add", a=2, b=40))[0]
    env._tools._tools[0]._own._timeout_s = 0.2
    assert "Error: sleep did not answer within 0.2 s" in env.step(call("sleep", seconds=3.0))[0]
    env._tools._tools[0]._own._timeout_s = PATIENCE_S
    assert "2" in env.step(call("add", a=1, b=1))[0]
    env.close()
    wait_until_none_is_left()


def test_a_shared_server_is_one_for_all_environments_of_the_process():
    first, second = (with_server(shared=True) for _ in range(2))
    assert "1 of tests" in first.step(call("count"))[0]
    first.close()
    assert "2 of tests" in second.step(call("count"))[0] and len(servers()) == 1
    second.close()
    servers()[0].kill()


@pytest.mark.parametrize(
    ("command", "cause"),
    [(["no-such-program"], "No such file"), ([sys.executable, "-c", "1/0"], "Connection closed")],
)
def test_a_server_that_does_not_start_is_an_error_with_its_name(command, cause):
    env = with_server(command=command)
    with pytest.raises(RuntimeError, match=f"tools.mcp.own: did not start: .*{cause}"):
        env.step(call("add"))


def test_a_server_that_never_answers_is_an_error_after_its_time():
    env = with_server(command=["sleep", "60"], timeout_s=0.5)
    with pytest.raises(RuntimeError, match=r"tools.mcp.own: did not start within 0.5 s \(timeout_s\)"):
        env.step(call("add"))


def test_without_the_package_it_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("roll.envs.tools.mcp_tool.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tools.mcp.own.command: needs the package mcp; pip install 'roll.mcp.'"):
        with_server()
