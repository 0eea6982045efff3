"""Tries the agents of a configuration before a run: an episode of each, with a gateway and a scripted policy here."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.agents.agent import Result
from roll.base.errors import Report
from roll.base.text import format_count
from roll.configs.agentic import AgenticConfig
from roll.configs.environments import MAX_REQUESTS
from roll.configs.user_code import NOTICE_S
from roll.datasets.records import DatasetError
from roll.gateway.server import GatewayServer
from roll.gateway.session import REQUESTS_EXHAUSTED, Dialogue
from roll.gateway.tool_parsers import hermes
from roll.hub.names import local_file
from roll.rollout.agents.sessions import SessionEnd, SessionSpec
from roll.rollout.types import GenerateRequest, GenerateResult, SamplingParams, Trajectory
from roll.usercode.agents.pool import AgentFailure, AgentPool, AgentSpec

TRIAL_S = 60.0
"""Longest trial of an agent with one script."""

START_TIMEOUT_S = 120.0
"""Deadline for the start of the process of agents."""

TEXT = "I do not know."
"""Answer of the scripts."""

VALUES: dict[str, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""Arguments with which a script calls a tool, by the type in its schema."""

ANY_LENGTH = 2**40
"""Characters that a conversation of a trial may have, and an answer."""


class Script:
    """A policy without a model, whose tokens are characters: calls each tool once, then says a text.

    It encodes messages as well: as the text in them, with the names of the tools where the model's template shows any.
    """

    def __init__(self, most_calls: int, text: str = TEXT, shows_tools: bool = True) -> None:
        self._most_calls, self._text, self._shows_tools = most_calls, text, shows_tools
        self._tools: Sequence[Mapping[str, Any]] = ()
        """Of the current request."""
        self._started: Sequence[Any] = ()
        self.called: list[str] = []

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The ids of the first messages; a session asks for those without tools, too, to compare them."""
        names = [{"content": tool["function"]["name"]} for tool in tools if self._shows_tools]
        shown = tools if tools or messages is not self._started else self._tools
        self._started = messages
        return self.follow(0, [*names, *messages], shown)

    def follow(self, last: int, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """The ids of later messages."""
        self._tools = tools
        texts = (str(message.get("content") or json.dumps(message.get("tool_calls", ""))) for message in messages)
        return [*map(ord, "\n".join(texts))]

    @property
    def encoder(self) -> Script:
        return self

    def encode_text(self, texts: list[str]) -> list[list[int]]:
        """Ids of stop strings: one each, since only the model's tokenizer knows better."""
        return [[0] for _ in texts]

    @staticmethod
    def decode(ids: list[int], stop_strings: Sequence[str] = ()) -> str:
        """The text of ids."""
        return "".join(map(chr, ids))

    async def generate(self, requests: Sequence[GenerateRequest], engine: int | None) -> list[GenerateResult]:
        """The answers of the script."""
        functions = [tool["function"] for tool in self._tools if len(self.called) < self._most_calls]
        function = next((each for each in functions if each["name"] not in self.called), None)
        text = self._text if function is None else _call(function)
        self.called += [] if function is None else [function["name"]]
        ids = [*map(ord, text)]
        zeros = [0] * len(ids)
        return [GenerateResult(each.request_id, ids, [0.0] * len(ids), zeros, "stop") for each in requests]


def _call(function: Mapping[str, Any]) -> str:
    fields = function.get("parameters", {}).get("properties", {})
    arguments = {name: _value(schema) for name, schema in fields.items()}
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def _value(schema: Mapping[str, Any]) -> Any:
    return next(iter(schema.get("enum", ())), schema.get("default", VALUES.get(str(schema.get("type")), "1")))


@dataclass(frozen=True)
class Tried:
    """What the trial of an agent found.

    Attributes:
        problem: why no script let it end with a result; empty if one did.
        failure: with the first script, where the second one let it end.
        warnings: what the gateway refused or ignored.
        text: its messages in the longest conversation, without the answers of the script.
        branches: the most of its sessions.
        done: what it did and returned.
    """

    problem: str
    failure: str
    warnings: tuple[str, ...]
    text: str
    branches: int = 1
    done: str = ""


def check_agents(
    config: AgenticConfig, report: Report, count: Callable[[str], int] | None, shows_tools: bool = True
) -> None:
    """Adds what is wrong with the agents of a configuration.

    Args:
        config: names the agents.
        report: gets the problems.
        count: the tokens of a text, where they are known.
        shows_tools: whether the chat template shows tools to the model.
    """
    for path, tried in try_agents(config, shows_tools).items():
        if tried.problem:
            report.error("", f"{tried.problem}\n    the agent {path} was tried before the run")
            continue
        if tried.failure:
            report.warn(path, f"failed in a part of its trial: {tried.failure.splitlines()[0]}")
        else:
            print(f"{path}: the trial succeeded: {tried.done}", file=sys.stderr, flush=True)
        counted = config.custom_envs[path.partition(".")[2]].branches
        if tried.branches > counted and config.sample_by == "traj":
            message = f"{counted}, and its trial had {tried.branches}, each a sample; use at least {tried.branches}"
            report.warn(f"{path}.branches", message)
        for warning in tried.warnings:
            report.warn(path, f"in its trial: {warning}")
        length, tokens = config.sequence_length or 0, 0 if count is None else count(tried.text)
        if tokens >= length:
            message = f"{length} has no room for the messages of {path} in its trial, {tokens} tokens; raise it"
            report.warn("sequence_length", message)


def try_agents(config: AgenticConfig, shows_tools: bool = True) -> dict[str, Tried]:
    """Tries each agent that is on this machine with its tasks, by the path of its entry; nothing it starts is left."""
    entries = {
        tag: entry
        for tag, entry in config.custom_envs.items()
        if entry.is_agent
        and (not entry.command or shutil.which(entry.command[0]))
        and all(local_file(name).is_file() for name in entry.tasks.file_name)
    }
    specs = {tag: AgentSpec.of_entry(tag, entry) for tag, entry in entries.items()}
    requests = {tag: entry.max_requests or MAX_REQUESTS for tag, entry in entries.items()}
    timeout_s = min(config.trajectory_timeout_s, TRIAL_S)
    return asyncio.run(_try_all(specs, requests, timeout_s, shows_tools)) if specs else {}


async def _try_all(
    specs: Mapping[str, AgentSpec], max_requests: Mapping[str, int], timeout_s: float, shows_tools: bool
) -> dict[str, Tried]:
    pool = AgentPool(1, START_TIMEOUT_S, capacity=1, log=os.devnull)
    try:
        return {
            f"custom_envs.{tag}": await _try(pool, spec, max_requests[tag], timeout_s, shows_tools)
            for tag, spec in specs.items()
        }
    finally:
        pool.close()


async def _try(pool: AgentPool, spec: AgentSpec, max_requests: int, timeout_s: float, shows_tools: bool) -> Tried:
    """A second script is tried where the first one fails: an agent may not expect the tool's answer, or the text."""
    notice = f"custom_envs.{spec.tag}: the trial of {spec.name} has taken {NOTICE_S:g} s; it ends after {timeout_s:g} s"
    timer = asyncio.get_running_loop().call_later(NOTICE_S, lambda: print(notice, file=sys.stderr, flush=True))
    failures: list[str] = []
    ends: list[SessionEnd] = []
    try:
        while len(failures) == len(ends) < 2:
            script = Script(0 if ends else max_requests - 1, shows_tools=shows_tools)
            result, failure, end = await play_script(pool, spec, script, max_requests, timeout_s)
            ends.append(end)
            failures += [failure] if failure else []
    finally:
        timer.cancel()
    text = max((_messages(end.trajectory) for end in ends if end.trajectory is not None), key=len, default="")
    warnings = dict.fromkeys(text for end in ends for text in end.warnings.values())
    if len(failures) < 2:
        branches = max(int(end.metrics["branches"]) for end in ends)
        return Tried("", "".join(failures), tuple(warnings), text, branches, _done(script, result, ends[-1]))
    refused = f"\n    the gateway refused a request of it: {next(iter(warnings))}" if warnings else ""
    return Tried(failures[0] + refused, "", (), text)


def _done(script: Script, result: Result | None, end: SessionEnd) -> str:
    requests = format_count(int(end.metrics["requests"]), "request")
    tools = f"it called {', '.join(script.called)}" if script.called else "no tool was called"
    return f"{requests}, {tools}" + ("" if result is None else f", reward {result.reward:g}")


def _messages(trajectory: Trajectory) -> str:
    starts = [0, *(turn.end for turn in trajectory.turns)]
    ends = [*(turn.start for turn in trajectory.turns), len(trajectory.ids)]
    return "".join(Script.decode(trajectory.ids[start:end]) for start, end in zip(starts, ends, strict=True))


async def play_script(
    pool: AgentPool, spec: AgentSpec, script: Script, max_requests: int, timeout_s: float
) -> tuple[Result | None, str, SessionEnd]:
    """The result of an agent, or why it has none, and what its session left; too many requests are no failure here."""
    server = GatewayServer(Dialogue(script, script.decode, hermes), script.generate)  # type: ignore[arg-type]
    await server.start()
    try:
        sampling = SamplingParams(max_new_tokens=ANY_LENGTH)
        address = await server.open(SessionSpec("trial", 0, None, sampling, ANY_LENGTH, max_requests))
        result, failure = None, ""
        try:
            result = await pool.run(spec, 0, address.variables, timeout_s)
        except (AgentFailure, DatasetError) as error:
            failure = str(error)
        end = await server.finish(address)
        exhausted = end.failure is not None and end.failure[0] == REQUESTS_EXHAUSTED
        return result, "" if exhausted else failure, end
    finally:
        await server.stop()
