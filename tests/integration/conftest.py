"""What the integration tests share: processes that cost seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Runs scenarios on Megatron layouts; its processes stay between tests."""
    pool = RankPool()
    yield pool
    pool.close()
