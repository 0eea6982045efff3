"""Processes that the integration tests share, since they cost seconds to start, and how to split the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rank_pool import RankPool
from tests.integration.shared_runs import SharedRuns

FIRST = ("shared_runs", "test_rehearse", "test_gpu_scripts", "rank_pool", "test_cluster_nodes", "test_sglang_strategy")
"""Groups that take long, in the order in which they start; two processes then end at about the same time."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups the tests of `pytest -n 2 --dist loadgroup`: those that share processes run in one test process.

    All files with `shared_runs` are a group, and all with `rank_pool`, so that there is one of each; the tests of any
    other file are one, too.
    """
    groups: dict[Path, str] = {}
    for item in items:
        shared = {"shared_runs", "rank_pool"}.intersection(getattr(item, "fixturenames", ()))
        if shared or item.path not in groups:
            groups[item.path] = min(shared, default=item.path.stem)
    ranks = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get(groups[item.path], len(FIRST)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))


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
