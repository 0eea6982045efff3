"""What the integration tests share: processes that cost seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.rank_pool import RankPool
from tests.integration.shared_runs import SharedRuns

_open: dict[str, RankPool | SharedRuns] = {}
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
    runs.close()


@pytest.fixture(scope="module", autouse=True)
def memory_for_this_file(request: pytest.FixtureRequest) -> None:
    """Ends shared processes that the tests of a file do not use: they take gigabytes, and Ray kills for memory."""
    text = request.path.read_text()
    for name, processes in _open.items():
        if name not in text:
            processes.free_memory()
