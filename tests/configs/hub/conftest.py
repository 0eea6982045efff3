"""A hub on this machine, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.configs.hub import fetch
from tests.hub_server import HubServer, go_online, serve_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running hub without repositories; the current folder is empty too."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(fetch, "RETRY_DELAY_S", 0.01)
    with serve_hub() as server:
        go_online(server, tmp_path / "cache", monkeypatch)
        yield server
