"""A server of MCP for tests; its state is that of its process."""

from __future__ import annotations

import os
import time

from mcp.server import MCPServer

server = MCPServer("tests")
calls: list[int] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """How often it was called."""
    calls.append(1)
    return f"{len(calls)} of {os.environ['OWNER']}"


@server.tool()
def fail(city: str) -> str:
    """Always fails."""
    raise ValueError(f"there is no {city}")


@server.tool()
def sleep(seconds: float) -> str:
    """Takes long."""
    time.sleep(seconds)
    return "rested"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
