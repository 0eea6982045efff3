"""The fork server: a warm interpreter in namespaces of its own, which forks a keeper and programs for each job.

The server itself never reads a job. It forks a keeper, the first process of new process ids, which reads the job, forks
the programs, collects what they send within their limits, and ends; with it everything that is left of them ends. The
keeper reads tests only after the program was forked, and expected results are never sent to it, so that the memory of a
program contains neither.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from roll.sandbox import assertions, isolation, programs
from roll.sandbox.programs import read_frame, write_frame

GO = b"j"
"""Byte before every job."""

FIRST_FREE = 20
"""File descriptors of a keeper are above; those of a program below."""


def main() -> None:
    """Serves jobs from standard input until it ends; arguments are the isolation and an empty folder."""
    wanted, folder = sys.argv[1], sys.argv[2]
    isolation.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_namespaces = wanted == "namespaces"
    try:
        if in_namespaces:
            isolation.enter_namespaces(folder)
            _warm_up()
        else:
            isolation.count_other_processes()
            isolation.PROGRAM_ID, isolation.TESTER_ID = 200_000 + 2 * os.getpid(), 200_001 + 2 * os.getpid()
    except OSError as error:
        write_frame(1, json.dumps({"error": str(error)}).encode())
        return
    isolation.be_opaque()
    isolation.call_filter(in_namespaces)
    gc.collect()
    gc.freeze()
    write_frame(1, json.dumps({"isolation": wanted}).encode())
    while os.read(0, 1) == GO:
        keeper = isolation.fork_with_new_pids() if in_namespaces else os.fork()
        if keeper == 0:
            _in_child(_keep if in_namespaces else lambda: _keep_without_namespaces(folder))
        status = os.waitpid(keeper, 0)[1]
        write_frame(1, json.dumps({"end": status}).encode())


def _warm_up() -> None:
    """Runs a first program, so that what only it needs is imported once and the kernel has made what it makes once."""
    child = isolation.fork_with_new_pids()
    if child == 0:
        _in_child(_try_program)
    if os.waitpid(child, 0)[1] != 0:
        raise PermissionError("a program cannot be started in the namespaces")


def _try_program() -> int:
    isolation.mount_work_folder()
    isolation.limit(2**30, 10)
    isolation.drop_privileges(isolation.PROGRAM_ID, True)
    return 0 if os.getpid() == 1 else 1


def _in_child(run: Callable[[], Any]) -> None:
    """Runs a function in a process that was just forked, and ends it."""
    status = 1
    try:
        status = run() or 0
    finally:
        os._exit(status)


def _keep_without_namespaces(folder: str) -> None:
    isolation.end_with_parent()
    isolation.adopt_orphans()
    work = tempfile.mkdtemp(dir=folder)
    os.chmod(work, 0o777)
    os.chdir(work)
    try:
        Keeper(in_namespaces=False).work()
    finally:
        os.chdir("/")
        shutil.rmtree(work, ignore_errors=True)


def _keep() -> None:
    isolation.end_with_parent()
    isolation.mount_work_folder()
    os.chdir(isolation.WORK_FOLDER)
    os.environ["HOME"] = isolation.WORK_FOLDER
    Keeper(in_namespaces=True).work()


class Keeper:
    """Runs one job and everything that it starts."""

    def __init__(self, in_namespaces: bool) -> None:
        self._in_namespaces = in_namespaces
        self._null = self._high(os.open("/dev/null", os.O_RDWR))

    def work(self) -> None:
        """Reads a job, runs it, and writes its results."""
        job = json.loads(read_frame(0))
        self._test_s, self._end = job["test_s"], time.monotonic() + job["total_s"]
        self._memory, self._most = job["memory_bytes"], job["output_bytes"]
        run = {"stdio": self._run_stdio, "calls": self._run_calls, "asserts": self._run_asserts}[job["kind"]]
        results = run(job)
        self._kill_all()
        write_frame(1, json.dumps({"results": results}).encode())

    def _run_stdio(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """What a program prints for each input; with `stop`, up to the first input for which it fails."""
        results: list[dict[str, Any]] = []
        for text in job["inputs"]:
            results.append(self._run_with_input(job["code"], text))
            self._kill_all()
            if job["stop"] and results[-1]["state"] != "ended":
                break
        return results

    def _run_with_input(self, code: str, text: str) -> dict[str, Any]:
        given = self._high(os.memfd_create("input"))
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(text.encode())
        os.lseek(given, 0, os.SEEK_SET)
        reading, writing = map(self._high, os.pipe())
        pid = self._fork({0: given, 1: writing, 2: self._null}, self._test_s, lambda: programs.run_program(code))
        os.close(writing)
        os.close(given)
        state, printed = self._collect(pid, reading)
        os.close(reading)
        return {"state": state, "text": printed.decode(errors="replace") if state == "ended" else ""}

    def _run_calls(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """What a function returns for each list of arguments; after a failure the others are tried, unless `stop`."""
        results: list[dict[str, Any]] = []
        arguments = job["arguments"]
        while len(results) < len(arguments):
            left = arguments[len(results) :]
            reading, writing = map(self._high, os.pipe())
            pid = self._fork(
                {0: self._null, 1: self._null, 2: self._null, 3: writing},
                self._test_s * len(left),
                lambda left=left: programs.call_function(job["code"], job["name"], left, 3),  # type: ignore[misc]
            )
            os.close(writing)
            frames, state = self._collect_frames(pid, reading, len(left))
            os.close(reading)
            self._kill_all()
            results += [{"state": "ended", "text": frame.decode(errors="replace")} for frame in frames]
            if len(frames) < len(left):
                results.append({"state": state, "text": ""})
                if job["stop"] or time.monotonic() >= self._end:
                    break
        return results

    def _run_asserts(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of `run_tests`; the tests are read after the process of the program was forked."""
        served, tested = map(self._high, programs.socket_pair())
        seconds = max(self._end - time.monotonic(), 1)
        quiet = {0: self._null, 1: self._null, 2: self._null}
        self._fork({**quiet, 3: served}, seconds, lambda: programs.answer_calls(job["code"], 3))
        os.close(served)
        tests = json.loads(read_frame(0))
        reading, writing = map(self._high, os.pipe())
        pid = self._fork(
            {**quiet, 3: tested, 4: writing},
            seconds,
            lambda: assertions.run_tests(tests["units"], tests["prefix"], tests["entry_point"], 3, 4),
            isolation.TESTER_ID,
        )
        os.close(tested)
        os.close(writing)
        frames, state = self._collect_frames(pid, reading, None)
        os.close(reading)
        return [*map(json.loads, frames), {"state": state}]

    def _high(self, fd: int) -> int:
        """The same file under a number that no program is given."""
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE)
        os.close(fd)
        return moved

    def _fork(self, files: dict[int, int], cpu_s: float, run: Callable[[], int], user: int | None = None) -> int:
        """Starts a process without privileges whose `files` are those of the keeper; `run` returns its exit status."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for number, fd in files.items():
                    os.dup2(fd, number)
                os.closerange(max(files) + 1, 4096)
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                isolation.limit(self._memory, cpu_s)
                isolation.drop_privileges(isolation.PROGRAM_ID if user is None else user, self._in_namespaces)
                isolation.end_with_parent()  # the kernel clears it when the user changes
                isolation.be_opaque()
                status = run()
            finally:
                os._exit(status)
        return pid

    def _collect(self, pid: int, fd: int) -> tuple[str, bytes]:
        """How a process ended, and what it wrote.

        Returns:
            state: `ended` with exit status 0; `failed`; `timeout`; or `output` for more than the limit.
            printed: all bytes up to the end of the process.
        """
        printed = bytearray()
        os.set_blocking(fd, False)
        deadline = min(time.monotonic() + self._test_s, self._end)
        handle = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(handle, select.POLLIN)
        is_open = True
        try:
            while True:
                ready = {number for number, _ in poll.poll(max(deadline - time.monotonic(), 0) * 1000)}
                if is_open and ready:
                    is_open = self._drain(fd, printed)
                    if len(printed) > self._most:
                        return "output", b""
                    if not is_open:
                        poll.unregister(fd)
                if handle in ready:
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    return ("ended" if status == 0 else "failed"), bytes(printed)
                if time.monotonic() >= deadline:
                    return "timeout", b""
        finally:
            os.close(handle)

    def _drain(self, fd: int, into: bytearray) -> bool:
        """Reads what is there, up to the limit; false at the end of the file."""
        while len(into) <= self._most:
            try:
                part = os.read(fd, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            into += part
        return True

    def _collect_frames(self, pid: int, fd: int, count: int | None) -> tuple[list[bytes], str]:
        """The first `count` messages of a process, or all of them, each within the time of a test, and its state."""
        frames: list[bytes] = []
        buffer = bytearray()
        os.set_blocking(fd, False)
        deadline = min(time.monotonic() + self._test_s, self._end)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while count is None or len(frames) < count:
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                return frames, "timeout"
            more = self._drain(fd, buffer)
            while len(buffer) >= programs.HEAD.size:
                size = programs.HEAD.unpack(buffer[: programs.HEAD.size])[0]
                if size > self._most:
                    return frames, "output"
                if len(buffer) < programs.HEAD.size + size:
                    break
                frames.append(bytes(buffer[programs.HEAD.size : programs.HEAD.size + size]))
                del buffer[: programs.HEAD.size + size]
                deadline = min(time.monotonic() + self._test_s, self._end)
            if not more:
                return frames[:count], "failed" if count is not None else "ended"
        return frames[:count], "ended"

    def _kill_all(self) -> None:
        while True:
            if self._in_namespaces:
                _kill_every_other()
            else:
                _kill_descendants()
            try:
                while os.waitpid(-1, 0 if self._in_namespaces else os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)


def _kill_every_other() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass  # there is none


def _kill_descendants() -> None:
    """Without namespaces: all processes of the users of programs where root gave them some, else the children."""
    if isolation.OUTER_USER == 0:
        for user in (isolation.PROGRAM_ID, isolation.TESTER_ID):
            killer = os.fork()
            if killer == 0:
                try:
                    os.setresuid(user, user, user)
                    _kill_every_other()
                finally:
                    os._exit(0)
            os.waitpid(killer, 0)
        return
    found = [os.getpid()]
    for parent in found:
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # it has ended
    for pid in found[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
