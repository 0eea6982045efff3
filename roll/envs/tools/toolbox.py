"""The tools of one environment: what the model reads about them, and the results of its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from roll.base.errors import ConfigError, Problem
from roll.base.schema import SECTION, declared, option
from roll.envs.options import choices, read_config
from roll.envs.tools.calls import ToolCall, ToolError, find_calls, response_message, tools_text
from roll.envs.tools.mcp_tool import McpOptions, McpTool
from roll.envs.tools.python_tool import PythonOptions, PythonTool
from roll.envs.tools.search_tool import SearchOptions, SearchTool

MOST_CALLS = 8
"""Calls of one turn that are answered; the model reads that there were more."""


class Tool(Protocol):
    """One or several functions that the model may call."""

    def schemas(self) -> list[dict[str, Any]]:
        """The functions, in the form of the `tools` of a chat completion."""

    def call(self, call: ToolCall) -> str:
        """The result; raises ToolError with what the model is to read."""

    def close(self) -> None:
        """Ends what belongs to this environment alone."""


@dataclass
class ToolsOptions:
    """What is common to the tools of an environment."""

    result_characters: int = option(4000, "Longest result that the model reads; the middle is left out.", ge=20)

    def check(self) -> Iterator[Problem]:
        """There is nothing to check between options."""
        return iter(())


@dataclass(frozen=True)
class ToolResults:
    """What the model reads after its calls, how many there were, and how many of them failed."""

    text: str
    calls: int
    errors: int


class Toolbox:
    """The tools that a section `tools` declares: `python`, `search`, and MCP servers by name under `mcp`."""

    def __init__(self, options: Mapping[str, Any], path: str = "tools") -> None:
        """Checks the options; servers start with the first use.

        Raises:
            ConfigError: an option is wrong, or a package is missing.
        """
        self._options, self._path = options, path
        known, common = ("python", "search", "mcp"), declared(ToolsOptions)
        wrong = [name for name in options if name not in (*known, *common)]
        if wrong:
            text = f"unknown tool; {choices(wrong[0], [*known, *common])}; other functions come from a server under mcp"
            raise ConfigError([Problem(f"{path}.{wrong[0]}", text)])
        self._common = read_config(ToolsOptions, {name: options[name] for name in common if name in options}, path)
        self._tools: list[Tool] = []
        if "python" in options:
            self._tools.append(PythonTool(read_config(PythonOptions, options["python"] or {}, f"{path}.python")))
        if "search" in options:
            self._tools.append(SearchTool(read_config(SearchOptions, options["search"] or {}, f"{path}.search")))
        servers = options.get("mcp") or {}
        if not isinstance(servers, Mapping):
            raise ConfigError([Problem(f"{path}.mcp", f"{servers!r} is not {SECTION}; name each server")])
        for name, server in servers.items():
            self._tools.append(McpTool(name, read_config(McpOptions, server, f"{path}.mcp.{name}")))

    def __reduce__(self) -> tuple[type[Toolbox], tuple[Mapping[str, Any], str]]:
        return Toolbox, (self._options, self._path)

    @cached_property
    def _functions(self) -> dict[str, tuple[Tool, dict[str, Any]]]:
        """Tool and schema of each function by name."""
        functions: dict[str, tuple[Tool, dict[str, Any]]] = {}
        for tool in self._tools:
            for schema in tool.schemas():
                name = schema["function"]["name"]
                if name in functions:
                    raise RuntimeError(f"{self._path}: two tools have a function {name}; leave one out")
                functions[name] = tool, schema
        return functions

    @property
    def instruction(self) -> str:
        return tools_text(schema for _, schema in self._functions.values())

    def answer(self, text: str) -> ToolResults | None:
        """The results of the calls in a model's text, in order; None if it has none."""
        calls = [call for _, call in find_calls(text)]
        if not calls:
            return None
        answers = [self._answer(call) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            answers.append((f"Error: only the first {MOST_CALLS} calls of a turn are answered", False))
        texts = [response_message(result) for result, _ in answers]
        return ToolResults("\n".join(texts), len(calls), len(calls) - sum(fine for _, fine in answers))

    def _answer(self, call: ToolCall | ToolError) -> tuple[str, bool]:
        """The result of a call as the model reads it, and whether there is one."""
        try:
            if isinstance(call, ToolError):
                raise call
            if call.name not in self._functions:
                raise ToolError(f"there is no function {call.name}; {choices(call.name, self._functions)}")
            return self._shortened(self._functions[call.name][0].call(call)), True
        except ToolError as error:
            return self._shortened(f"Error: {error}"), False

    def _shortened(self, text: str) -> str:
        most = self._common.result_characters
        if len(text) <= most:
            return text
        half = most // 2
        return f"{text[:half]}\n... ({len(text) - 2 * half} characters are left out) ...\n{text[-half:]}"

    def close(self) -> None:
        """Ends what the tools of this environment have started."""
        for tool in self._tools:
            tool.close()
