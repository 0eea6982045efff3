"""Fixtures of every test: environment variables, the tiny model, and a check for leftover processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it

os.environ.update(
    HF_HUB_OFFLINE="1",  # nothing in a test may depend on a network
    TOKENIZERS_PARALLELISM="false",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    MPLBACKEND="agg",
)

import psutil
import pytest

LEAVE_S = 15.0
"""Time for processes to end after the tests; Ray's own daemons take a few seconds."""

RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""Python's own helper of spawned processes: it ends with the process that started it, not before."""


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny Qwen2 of examples/tiny_math, made once."""
    from examples.tiny_math.prepare import prepare

    return prepare(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Makes the tiny Qwen2 from a seed, each seed once: `tiny_model(7)` is its folder."""
    from examples.tiny_math.prepare import prepare

    folders: dict[int, Path] = {}

    def make(seed: int) -> Path:
        if seed not in folders:
            folders[seed] = prepare(tmp_path_factory.mktemp(f"tiny_model_{seed}"), seed)
        return folders[seed]

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of its own of 1 MiB; the test is skipped where this user may not mount one."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails the session when a process that a test started still runs after all fixtures are torn down.

    Processes started through Ray are not children of this one, so they are known by an environment variable that
    every descendant inherits.
    """
    mark = str(os.getpid())
    os.environ["ROLL_TEST_SESSION"] = mark
    yield
    left = _descendants(mark)
    _, alive = psutil.wait_procs(left, timeout=LEAVE_S)
    names = [f"{process.pid} {' '.join(_command(process))[:120]}" for process in alive]
    for process in alive:
        process.kill()
    if names:
        pytest.fail("processes left behind by the tests:\n  " + "\n  ".join(names), pytrace=False)


def _descendants(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.environ().get("ROLL_TEST_SESSION") != mark:
                continue
            if RESOURCE_TRACKER not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or belongs to someone else
            continue
    return found


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return ["ended meanwhile"]
