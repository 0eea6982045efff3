"""What the integration tests share: processes that cost seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.rank_pool import RankPool
from tests.integration.shared_runs import SharedRuns


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Runs scenarios on Megatron layouts; its processes stay between tests."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRuns]:
    """Runs configurations in one Ray session whose worker processes and engines stay between runs."""
    runs = SharedRuns(tmp_path_factory.mktemp("shared_runs"))
    yield runs
    runs.close()
