"""Downloads: whole, once, continued after a cut connection, and their errors."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roll.hub.fetch import fetch, list_files, model_files
from roll.hub.names import HubError, HubName, HubUnreachable, cached_folder
from tests.hub_server import HubServer, commit_of

NAME = HubName("model", "tiny/random")
BIG = 5 << 19


@pytest.fixture
def folder(hub: HubServer, tmp_path: Path) -> Path:
    """A served repository with two large files and small ones."""
    folder = tmp_path / "served"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"0" * 10)
    (folder / "original" / "weights.safetensors").write_bytes(b"0" * 10)
    for index in (1, 2):
        (folder / f"model-{index}.safetensors").write_bytes(os.urandom(BIG))
    hub.add("models", "tiny/random", folder)
    return folder


def fetch_all() -> Path:
    listing = list_files(NAME)
    return fetch(listing, model_files(listing))


def same(one: Path, other: Path) -> bool:
    return hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(other.read_bytes()).digest()


def test_what_a_run_needs_is_fetched_once_and_nothing_else(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot = fetch_all()
    wanted = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in snapshot.iterdir()) == wanted
    assert same(snapshot / "model-1.safetensors", folder / "model-1.safetensors")
    assert snapshot == cached_folder(NAME) and snapshot.name == commit_of(folder)
    assert snapshot_download(NAME.repo, cache_dir=snapshot.parents[2], local_files_only=True) == str(snapshot)
    hub.requests.clear()
    fetch_all()
    assert [path for _, path, _ in hub.requests] == ["/api/models/tiny/random"]


def test_a_cut_connection_is_continued_where_it_ended(
    hub: HubServer, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    (folder / "model-2.safetensors").unlink()
    hub.cut_after = [100_000, 50_000]
    with caplog.at_level(logging.INFO, "roll"):
        snapshot = fetch_all()
    assert hub.downloads("model-1.safetensors") == ["", "bytes=100000-", "bytes=150000-"]
    assert same(snapshot / "model-1.safetensors", folder / "model-1.safetensors")
    assert "fetching tiny/random: 3 files, 2.5 MiB to" in caplog.text
    assert "fetching tiny/random: model-1.safetensors: 2.5 MiB of 2.5 MiB (100 %)" in caplog.text


def test_two_fetches_at_once_download_each_file_once(hub: HubServer, folder: Path) -> None:
    listing = list_files(NAME)
    with ThreadPoolExecutor(3) as threads:
        fetches = [threads.submit(fetch, listing, model_files(listing)) for _ in range(3)]
    assert len({fetched.result() for fetched in fetches}) == 1
    assert hub.downloads("model-1.safetensors") == [""]


def test_a_repository_that_does_not_exist_and_one_that_is_gated_say_what_to_do(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match=r"has no model of this name, or it is private and HF_TOKEN"):
        list_files(HubName("model", "tiny/randon"))
    with pytest.raises(HubError, match="has tiny/random, but no revision v9 of it"):
        list_files(HubName("model", "tiny/random", "v9"))
    hub.gated.add("tiny/random")
    with pytest.raises(HubError, match=r"its terms must be accepted at http://.*/tiny/random, and HF_TOKEN"):
        list_files(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert (fetch_all() / "config.json").is_file()


def test_a_hub_that_is_down_is_unreachable(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 503
    with pytest.raises(HubUnreachable, match="answered 503"):
        list_files(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match="http://127.0.0.1:9 cannot be reached"):
        list_files(NAME)


def test_a_model_without_safetensors_is_refused(hub: HubServer, folder: Path) -> None:
    for index in (1, 2):
        (folder / f"model-{index}.safetensors").unlink()
    with pytest.raises(HubError, match=r"has no \*.safetensors; convert the model"):
        model_files(list_files(NAME))


def test_a_disk_that_is_too_small_is_reported_before_anything_is_fetched(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = list_files(NAME)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(HubError, match=r"has 0.0 MiB free, and 5.0 MiB are to be fetched"):
        fetch(listing, model_files(listing))
    assert not hub.downloads(".safetensors")


def test_a_disk_that_fills_up_is_one_sentence(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    listing = list_files(NAME)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(HubError, match="cannot be written: No space left on device; set HF_HOME"):
        fetch(listing, model_files(listing))
