"""A client of MCP servers that run as child processes and speak over their standard streams (package `mcp`)."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from roll.base.errors import Problem
from roll.base.schema import one_or_many, option
from roll.envs.tools.background import run_on_tool_loop, tool_loop
from roll.envs.tools.calls import ToolCall, ToolError, function_schema

INSTALL = "needs the package mcp; pip install 'roll[mcp]'"

_starting = threading.Lock()
_shared: dict[str, McpServer] = {}


@dataclass
class McpOptions:
    """Options of one server."""

    command: list[str] = option(
        factory=list, parse=one_or_many, help="Program and arguments; it speaks MCP over standard input and output."
    )
    env: dict[str, str] = option(factory=dict, help="Environment variables of the server, beside PATH and HOME.")
    timeout_s: float = option(30.0, "Longest time of a call, and of the start of the server, in seconds.", gt=0)
    shared: bool = option(
        False, "One server for all environments of a process, for servers without state; else one for each episode."
    )

    def check(self) -> Iterator[Problem]:
        """Yields a command that is missing, and the package if it is."""
        if not self.command:
            yield Problem("command", "is empty; write the program of the server and its arguments")
        if find_spec("mcp") is None:
            yield Problem("command", INSTALL)


class McpServer:
    """A running server and the session with it. It ends with `stop`, with this object, or with the process."""

    def __init__(self, name: str, options: McpOptions) -> None:
        """Starts it.

        Raises:
            RuntimeError: it did not start in time.
        """
        self._name, self._timeout_s = name, options.timeout_s
        self._end = asyncio.Event()
        self.stop = weakref.finalize(self, tool_loop().call_soon_threadsafe, self._end.set)
        self._session, self.tools = run_on_tool_loop(_opened(name, options, self._end))

    def request(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of an answer.

        Raises:
            ToolError: the server answers with an error, or not in time.
        """
        answering = self._session.call_tool(name, arguments)
        try:
            answer = run_on_tool_loop(asyncio.wait_for(answering, self._timeout_s))
        except TimeoutError:
            raise ToolError(f"{name} did not answer within {self._timeout_s:g} s") from None
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in answer.content)
        if _is_error(answer):
            raise ToolError(text)
        return text


def _is_error(answer: Any) -> bool:
    """`isError` in version 1 of the package, `is_error` in version 2."""
    return bool(getattr(answer, "isError", False) or getattr(answer, "is_error", False))


async def _opened(name: str, options: McpOptions, end: asyncio.Event) -> tuple[Any, list[Any]]:
    opened = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_serve(options, opened, end))
    try:
        async with asyncio.timeout(options.timeout_s):
            await asyncio.wait([task, opened], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        end.set()
        task.cancel()
        raise RuntimeError(f"tools.mcp.{name}: did not start within {options.timeout_s:g} s (timeout_s)") from None
    if not opened.done():
        error: BaseException | None = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise RuntimeError(f"tools.mcp.{name}: did not start: {error}") from error
    session, tools = opened.result()
    return session, tools


async def _serve(options: McpOptions, opened: asyncio.Future[Any], end: asyncio.Event) -> None:
    """Holds a session until `end`; one task has to enter and leave it."""
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    program, *arguments = options.command
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | options.env
    server = StdioServerParameters(command=program, args=arguments, env=variables)
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        opened.set_result((session, (await session.list_tools()).tools))
        await end.wait()


class McpTool:
    """The functions of one server."""

    def __init__(self, name: str, options: McpOptions) -> None:
        """Starts nothing: the first use does."""
        self._name, self._options = name, options
        self._own: McpServer | None = None

    def schemas(self) -> list[dict[str, Any]]:
        """The functions that the server lists; starts it."""
        return [
            function_schema(each.name, each.description or "", getattr(each, "inputSchema", None) or each.input_schema)
            for each in self._server().tools
        ]

    def call(self, call: ToolCall) -> str:
        return self._server().request(call.name, call.arguments)

    def close(self) -> None:
        """Ends the server, unless it is shared."""
        if self._own is not None and not self._options.shared:
            self._own.stop()
        self._own = None

    def _server(self) -> McpServer:
        if self._own is not None:
            return self._own
        if not self._options.shared:
            self._own = McpServer(self._name, self._options)
            return self._own
        with _starting:
            key = repr(self._options)
            if key not in _shared:
                _shared[key] = McpServer(self._name, self._options)
            self._own = _shared[key]
        return self._own
