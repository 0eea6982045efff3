"""What the integration tests share: processes that cost seconds to start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from roll.configs.pipeline import BaseConfig
from roll.distributed.ray_session import start_ray, stop_ray
from tests.integration.rank_pool import RankPool
from tests.integration.runs import inputs_in
from tests.integration.shared_runs import SharedRuns
from tests.processes import PATIENCE_S

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; a test that needs it is skipped where none is installed."""
    from playwright.sync_api import expect, sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as started:
        yield started.chromium.launch(executable_path=path, args=BROWSER_FLAGS, timeout=1000 * PATIENCE_S)


class SharedProcesses(Protocol):
    """Processes that can end early; those who need them later start others."""

    def free_memory(self) -> None: ...


_open: dict[str, SharedProcesses] = {}
"""The shared processes by the name of their fixture."""


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Runs scenarios on Megatron layouts; its processes stay between tests."""
    pool = _open["rank_pool"] = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRuns]:
    """Runs configurations in one Ray session whose worker processes and engines stay between runs."""
    runs = _open["shared_runs"] = SharedRuns(tmp_path_factory.mktemp("shared_runs"))
    yield runs
    runs.free_memory()


class OwnRay:
    """A Ray session of this process with two devices."""

    def __init__(self, folder: Path) -> None:
        self._config = BaseConfig(output_dir=str(folder))

    def start(self) -> None:
        """Starts it, unless it runs."""
        start_ray(self._config, "cpu", num_devices=2)

    def free_memory(self) -> None:
        """Ends it, and its actors."""
        stop_ray()


@pytest.fixture(scope="session")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRay]:
    own = OwnRay(tmp_path_factory.mktemp("ray"))
    yield own
    own.free_memory()


@pytest.fixture(scope="module")
def on_ray(own_ray: OwnRay) -> None:
    """Ray runs in this process; the next file that needs it finds it running."""
    _open["on_ray"] = own_ray
    own_ray.start()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    """The part of a recipe that says where model and problems are."""
    return inputs_in(tmp_path_factory.mktemp("problems"), tiny_model_dir)


@pytest.fixture(scope="module", autouse=True)
def memory_for_this_file(request: pytest.FixtureRequest) -> None:
    """Ends shared processes that the tests of a file do not use: they take gigabytes, and Ray kills for memory."""
    text = request.path.read_text()
    for name in [name for name in _open if name not in text]:
        _open[name].free_memory()
