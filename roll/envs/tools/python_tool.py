"""A tool that runs a Python program of the model in the sandbox of `roll.sandbox`; programs share no state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roll.base.errors import Problem
from roll.base.schema import option
from roll.envs.tools.background import run_on_tool_loop
from roll.envs.tools.calls import ToolCall, ToolError, function_schema, text_argument, text_parameter
from roll.sandbox.client import Job, Limits, SandboxError, idle_sandbox

DESCRIPTION = (
    "Runs a Python program in a new interpreter. Returns what it prints, and the value of its last expression."
)

START_S = 10.0
"""Seconds beyond the time of a program in which its process has to start and end."""

DRIVER = """
def _run(code):
    import ast, sys, traceback
    sys.stderr = sys.stdout
    try:
        tree = ast.parse(code)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        names = {**globals(), "__name__": "__main__"}
        exec(compile(tree, "<python>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names) if last else None
        if value is not None:
            print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == "<python>"]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f" in line {line}" if line else ""
        print(f"Error{where}: {type(error).__name__}: {getattr(error, 'msg', error)}")
"""
"""Runs a program as an interactive interpreter does, and prints an exception with its line."""


@dataclass
class PythonOptions:
    """Options of the tool."""

    timeout_s: float = option(10.0, "Longest time of a program in seconds.", gt=0)
    memory_limit_mb: int = option(1024, "Memory of a program.", ge=64)

    def check(self) -> Iterator[Problem]:
        """There is nothing to check between options."""
        return iter(())


class PythonTool:
    """The function `python`."""

    def __init__(self, options: PythonOptions) -> None:
        self._options = options

    def schemas(self) -> list[dict[str, Any]]:
        return [function_schema("python", DESCRIPTION, text_parameter("code", "The program."))]

    def call(self, call: ToolCall) -> str:
        """What the program printed; its exception, if it raised one, is the last line.

        Raises:
            ToolError: it did not end in time, was killed, or printed too much.
            SandboxError: the sandbox failed.
        """
        result = run_on_tool_loop(self._run(text_argument(call, "code")))
        if result["state"] == "timeout":
            raise ToolError(f"the program did not end within {self._options.timeout_s:g} s")
        if result["state"] == "output":
            raise ToolError(f"the program printed more than {Limits.output_bytes >> 20} MiB")
        if result["state"] == "failed":
            raise ToolError(f"the program was killed; it may use {self._options.memory_limit_mb} MiB of memory")
        return str(result["text"]).rstrip("\n") or "(nothing was printed)"

    def close(self) -> None:
        """Nothing to end: a program ends with its call."""

    async def _run(self, code: str) -> dict[str, Any]:
        seconds = self._options.timeout_s
        limits = Limits(seconds, seconds + START_S, self._options.memory_limit_mb * 2**20)
        async with idle_sandbox() as sandbox:
            results = await sandbox.run(Job(f"{DRIVER}\n_run({code!r})", "stdio", inputs=[""]), limits)
        if not results:
            raise SandboxError("the sandbox returned no result")
        return results[0]
