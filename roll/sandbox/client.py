"""Starts a fork server and sends it jobs; the only part of the sandbox that the rest of the project uses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from roll.sandbox.isolation import PYTHON_FOLDERS, Isolation
from roll.sandbox.programs import HEAD, MAX_FRAME
from roll.sandbox.server import GO

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from roll.sandbox import server; del sys.path[0]; server.main()"
)
"""What the interpreter of a server runs; the first argument is the folder of this project."""

START_TIMEOUT_S = 60.0
GRACE_S = 5.0
"""Seconds beyond the time of a job after which its server is considered broken and killed."""

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables of programs; nothing is inherited."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        test_s: seconds of one test.
        total_s: seconds of all tests.
        memory_bytes: address space.
        output_bytes: of one test.
    """

    test_s: float = 6.0
    total_s: float = 50.0
    memory_bytes: int = 2**30
    output_bytes: int = 2**20


@dataclass(frozen=True)
class Job:
    """A program and how it is run.

    Attributes:
        code: of the program.
        kind: `stdio` runs it with each of `inputs`; `calls` calls a function; `asserts` runs tests against it.
        stop: with `stdio` and `calls`, end at the first failure.
        inputs: texts of standard input.
        name: of the function, for `calls`.
        arguments: `encode`d lists, for `calls`.
        units: code of tests, for `asserts`.
        prefix: code before the tests.
        entry_point: expression that the function `check` of tests gets.
    """

    code: str
    kind: str
    stop: bool = True
    inputs: list[str] = field(default_factory=list)
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    prefix: str = ""
    entry_point: str = ""

    def frames(self, limits: Limits) -> list[dict[str, Any]]:
        """The messages of the job; tests are in one of their own."""
        tests = {"units": self.units, "prefix": self.prefix, "entry_point": self.entry_point}
        own = {key: value for key, value in vars(self).items() if key not in tests}
        return [own | vars(limits), *([tests] if self.kind == "asserts" else [])]


class Sandbox:
    """One fork server, which runs one job at a time. Use it from one asyncio loop."""

    def __init__(self, isolation: Isolation | None = None) -> None:
        """Starts nothing; with None the first `run` starts the server in namespaces, where the kernel allows them."""
        self._wanted = isolation
        self._server: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder = ""

    async def run(self, job: Job, limits: Limits) -> list[dict[str, Any]]:
        """What the tests of a job gave, in order; of tests that were not run, nothing.

        For `stdio` and `calls` each has `state` (`ended`, `failed`, `timeout` or `output`) and `text`, what was printed
        or the `encode`d result. For `asserts`, the messages of `run_tests` and a last one with `state`.

        Raises:
            SandboxError: the server cannot be started, or did not answer in time; the next call starts another.
        """
        if self._server is None or self._loop is not asyncio.get_running_loop():
            self.close()
            await self._start()
        messages = [json.dumps(each).encode() for each in job.frames(limits)]
        if any(len(each) > MAX_FRAME for each in messages):
            raise SandboxError(f"the tests have more than {MAX_FRAME} bytes")
        try:
            async with asyncio.timeout(limits.total_s + GRACE_S):
                self._writer.write(GO + b"".join(HEAD.pack(len(each)) + each for each in messages))
                await self._writer.drain()
                answer = await self._read()
                if "results" in answer:
                    await self._read()
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            self.close()
            raise SandboxError(f"the sandbox failed: {type(error).__name__}: {error}") from error
        except BaseException:
            self.close()
            raise
        if "results" not in answer:
            self.close()
            raise SandboxError(f"the sandbox could not run the program: status {answer.get('end')}")
        results: list[dict[str, Any]] = answer["results"]
        return results

    async def _start(self) -> None:
        wanted = self._wanted or available_isolation()[0]
        self._folder = tempfile.mkdtemp(prefix="roll-sandbox-")
        os.chmod(self._folder, 0o711)
        own, servers = socket.socketpair()
        with servers:
            self._server = subprocess.Popen(
                _command(wanted, self._folder),
                stdin=servers.fileno(),
                stdout=servers.fileno(),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = await asyncio.open_connection(sock=own, limit=MAX_FRAME)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                hello = await self._read()
        except (TimeoutError, OSError, EOFError) as error:
            self.close()
            raise SandboxError(f"the sandbox did not start: {error!r}") from error
        except BaseException:
            self.close()
            raise
        if "error" in hello:
            self.close()
            raise SandboxError(f"the sandbox did not start: {hello['error']}")
        if wanted == "namespaces":
            self._remove_folder()  # the server's root is mounted in namespaces of its own by now

    async def _read(self) -> dict[str, Any]:
        size = HEAD.unpack(await self._reader.readexactly(HEAD.size))[0]
        message: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        return message

    def close(self) -> None:
        """Kills the server and all that it has started. Safe to call twice."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
            if self._loop is not None and not self._loop.is_closed():
                self._writer.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


_idle: list[Sandbox] = []
"""Servers that no call uses; there are as many as calls at a time."""


@asynccontextmanager
async def idle_sandbox() -> AsyncIterator[Sandbox]:
    """A server for one call; one that failed starts again."""
    sandbox = _idle.pop() if _idle else Sandbox()
    try:
        yield sandbox
    finally:
        _idle.append(sandbox)


def _command(isolation: Isolation, folder: str) -> list[str]:
    return [sys.executable, "-I", "-c", BOOT, PACKAGE_ROOT, isolation, folder]


@cache
def available_isolation() -> tuple[Isolation, str]:
    """How programs are isolated on this machine, and why not by namespaces; tried once, with a server of its own."""
    with tempfile.TemporaryDirectory(prefix="roll-sandbox-") as folder:
        try:
            tried = subprocess.run(
                _command("namespaces", folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=ENVIRONMENT,
                cwd="/",
                timeout=START_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return "processes", "they could not be set up in time"
    answer = json.loads(tried.stdout[HEAD.size :] or b"{}")
    if "isolation" in answer:
        return "namespaces", ""
    reason = answer.get("error", tried.stderr.decode(errors="replace")[-200:])
    return "processes", f"{reason}{_private_python()}"


def _private_python() -> str:
    """For root, whose programs get another user: the folder of Python that this user cannot enter, or nothing."""
    if os.geteuid() != 0:
        return ""
    for folder in PYTHON_FOLDERS:
        closed = [path for path in (Path(folder), *Path(folder).parents) if not path.stat().st_mode & 0o001]
        if closed:
            return f"; programs cannot import what is below {closed[-1]}, which only its owner may enter"
    return ""
