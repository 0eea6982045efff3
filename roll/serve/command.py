"""`roll serve`: opens trainer and engines of a configuration, and serves Tinker's API until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from roll.base.errors import RunError
from roll.tools.terminal import integer, option_error

if TYPE_CHECKING:
    from roll.api.open import OpenRun

LOOPBACK = "127.0.0.1"

ENDED_POLL_S = 1.0
"""Between two looks at whether the run has ended."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `roll serve`."""
    parser.add_argument("--host", default=LOOPBACK, metavar="HOST", help=f"address to listen on (default: {LOOPBACK})")
    parser.add_argument("--port", type=integer(0), default=0, metavar="PORT", help="default: a free one")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM; the port is bound before anything is started.

    Raises:
        ConfigError: the configuration, the address or the port cannot be used.
        RunError: trainer or engines have ended.
    """
    from roll.api.open import open_run

    with _listen(arguments.host, arguments.port) as listening, suppress(KeyboardInterrupt):
        with open_run(arguments.config, *arguments.overrides) as opened:
            asyncio.run(serve_run(opened, listening))
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        message = f"{host}:{port}: {error}; use an address of this machine and a free port"
        raise option_error("--host, --port", message) from None


async def serve_run(opened: OpenRun, listening: socket.socket) -> None:
    """Serves on a socket until SIGTERM.

    Raises:
        RunError: the run has ended, which is noticed within ENDED_POLL_S.
    """
    from roll.serve.server import TinkerServer
    from roll.serve.service import TinkerService

    server = TinkerServer(TinkerService(opened))
    url = await server.start(listening)
    print(f"serving {server.service.base_model}\n  export TINKER_BASE_URL={url}", flush=True)
    print(f"  export TINKER_API_KEY={server.key}", flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        while not stopped.is_set():
            if (why := opened.why_ended()) is not None:
                raise RunError(f"{opened.folder}: {why}")
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), ENDED_POLL_S)
    finally:
        await server.stop()
