"""Agents are tried before a run: what fails, what only one of the scripts shows, and how long a conversation is."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.base.errors import Report
from roll.plan.agent_trial import check_agents
from tests.configs.samples import agentic
from tests.configs.test_agent_keys import AGENTS

BEGIN = """
import json
from openai import BadRequestError, OpenAI
from roll.agents import Agent, Result

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "unit": {"enum": ["cm", "m"]}, "to": {"type": "string", "default": "z"}}}}
TOOLS = [{"type": "function", "function": TOOL}]

def ask(messages, **options):
    return OpenAI().chat.completions.create(model="policy", messages=messages, **options).choices[0].message

class Solver(Agent):
    def run(self, task, seed):
        question = {"role": "user", "content": "How much?"}
"""

CALLS_TOOL = """
        first = ask([question], tools=TOOLS)
        for call in first.tool_calls or []:
            assert json.loads(call.function.arguments) == {"a": 1, "unit": "cm", "to": "z"}
            answer = {"role": "tool", "tool_call_id": call.id, "content": "x" * 600}
            second = ask([question, first, answer], tools=TOOLS)
            assert second.content == "I do not know."
        return Result(0.0)
"""


TWO_TOOLS = """
        more = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "leave")]
        messages = [question]
        while calls := (answer := ask(messages, tools=TOOLS + more)).tool_calls:
            messages += [answer, *({"role": "tool", "tool_call_id": call.id, "content": "1"} for call in calls)]
        assert ask([{"role": "user", "content": "Sum up."}]).content == "I do not know."
        return Result(0.5)
"""


def tried(
    folder: Path, code: str, monkeypatch: pytest.MonkeyPatch, *overrides: str, shows_tools: bool = True
) -> Report:
    (folder / "trial_agent.py").write_text(BEGIN + code)
    monkeypatch.syspath_prepend(str(folder))
    config = agentic(folder, "custom_envs.Solver.agent=trial_agent:Solver", *overrides, text=AGENTS)
    report = Report()
    check_agents(config, report, lambda text: len(text) // 2, shows_tools)
    return report


@pytest.mark.parametrize(
    ("code", "errors", "warnings"),
    [
        (CALLS_TOOL, [], []),
        ("        while True: ask([question])", [], ["Solver: in its trial: this session may send 30 requests"]),
        ("        return Result(float(ask([question], tools=TOOLS).content.count('know')))", [],
         ["custom_envs.Solver: failed in a part of its trial: ", "trial_agent.py:16: AttributeError"]),
        ("        return ask([question]).content", ["trial_agent.py:14: run returned a str; return Result"], []),
        ("        return float(ask([question]).content)", ["trial_agent.py:16: ValueError: could not convert"], []),
        ("        ask([question], response_format={'type': 'json_object'})",
         ["trial_agent.py:11: BadRequestError: Error code: 400", "constrained decoding would sample"], []),
        ("        import no_such_package", ["trial_agent.py:16: ModuleNotFoundError"], []),
        ("        while True: pass", ["trial_agent.py:16: it was not over after 8 s"], []),
    ],
)  # fmt: skip
def test_the_trial_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, errors: list[str], warnings: list[str]
) -> None:
    seconds = 8 if "pass" in code else 600
    limits = [f"{name}={seconds}" for name in ("trajectory_timeout_s", "actor_infer.generation_timeout_s")]
    report = tried(tmp_path, code, monkeypatch, *limits)
    problems, remarks = ("\n".join(map(str, found)) for found in (report.errors, report.warnings))
    assert all(text in problems for text in errors) and bool(problems) == bool(errors), problems
    assert all(text in remarks for text in warnings) and bool(remarks) == bool(warnings), remarks


def test_each_tool_is_called_once_and_branches_that_are_not_counted_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tried(tmp_path, TWO_TOOLS, monkeypatch)
    done = "custom_envs.Solver: the trial succeeded: 5 requests, it called add, look, leave, reward 0.5\n"
    assert capsys.readouterr().err.endswith(done) and not report.errors
    assert [*map(str, report.warnings)] == [
        "custom_envs.Solver.branches: 1, and its trial had 2, each a sample; use at least 2"
    ]
    assert not tried(tmp_path, TWO_TOOLS, monkeypatch, "custom_envs.Solver.branches=2").warnings


def test_a_conversation_longer_than_the_sequence_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tried(tmp_path, CALLS_TOOL, monkeypatch, "sequence_length=256")
    assert [each.path for each in report.warnings] == ["sequence_length"] and not report.errors


def test_a_template_that_shows_no_tools_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tried(tmp_path, CALLS_TOOL, monkeypatch, shows_tools=False)
    [warning] = report.warnings
    assert "data_args.template: does not show tools" in str(warning) and not report.errors
