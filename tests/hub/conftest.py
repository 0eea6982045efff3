"""A hub on this machine, and an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import HubServer, go_online, serve_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running hub without repositories; the current folder is empty too."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with serve_hub() as server:
        go_online(server, tmp_path / "cache", monkeypatch)
        yield server
