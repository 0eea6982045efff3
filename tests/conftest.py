"""Fixtures of every test: environment variables, the tiny model, and a check for leftover processes."""

from __future__ import annotations

import functools
import gc
import os
import re
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
    OMP_WAIT_POLICY="passive",  # threads of several runs share the cores: one that waits must not spin
    MPLBACKEND="agg",
)

import psutil
import pytest
import xdist.scheduler
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # on a busy machine any example may take long
settings.load_profile("no deadline")

LEAVE_S = 120.0
"""Time for processes to end after the tests; Ray's own daemons take a few seconds."""

RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""Python's own helper of spawned processes: it ends with the process that started it, not before."""


IN_ONE_PROCESS = ("shared_runs", "rank_pool", "several engines", "on_ray")
"""Fixtures whose processes are large and stay until the tests end, and words of files with large runs of their own: one
test process runs all files that have one."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> xdist.scheduler.LoadScopeScheduling | None:
    """With `--dist loadfile`, files that share one of `IN_ONE_PROCESS` are as one file."""
    return FixtureScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class FixtureScheduling(xdist.scheduler.LoadScopeScheduling):
    """Gives a process all tests of a file, or of all files that share a large fixture."""

    def _split_scope(self, nodeid: str) -> str:
        return held_fixture(self.config.rootpath / nodeid.split("::")[0]) or nodeid.split("::")[0]


@functools.cache
def held_fixture(path: Path) -> str | None:
    """Which of `IN_ONE_PROCESS` a test file uses."""
    text = path.read_text()
    return next((name for name in IN_ONE_PROCESS if name in text), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "integration or slow"`, files that have neither marker are not even imported, which takes seconds."""
    if config.option.markexpr != "integration or slow" or not collection_path.name.startswith("test_"):
        return None
    return None if re.search(r"mark\.(integration|slow)", collection_path.read_text()) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a large fixture run first: they are the longest parts that are not divided."""
    items.sort(key=lambda item: held_fixture(item.path) is None)


def pytest_collection_finish() -> None:
    """Exempts the modules imported so far from garbage collection, which the tests trigger hundreds of times."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Lets the modules end as they would without `pytest_collection_finish`."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def python_searches_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this package set PYTHONSAFEPATH; a test that runs one in this process must not leave it set."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


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
