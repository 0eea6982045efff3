"""A server on this machine with the addresses of the Hugging Face Hub: listings, files, parts of files, errors."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

SMALL = 1000
"""Files below this many bytes are not stored as LFS files."""


@dataclass
class HubServer:
    """Repositories that are served, and what was asked for.

    Attributes:
        repositories: folder of each by kind and name, as (`models`, `owner/name`).
        requests: method, path and Range of every request.
        cut_after: bytes after which a connection that sends a file is cut, once for each entry.
        gated: names of repositories that need a token.
        status: answered to every request instead, if set.
    """

    url: str = ""
    repositories: dict[tuple[str, str], Path] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    gated: set[str] = field(default_factory=set)
    status: int | None = None

    def add(self, kind: str, name: str, folder: Path) -> None:
        self.repositories[kind, name] = folder

    def downloads(self, ending: str) -> list[str]:
        """The Range of every GET of a file with this ending, empty for the whole file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(ending)]


def commit_of(folder: Path) -> str:
    text = "".join(f"{path}{digest(path)}" for path in files_of(folder))
    return hashlib.sha1(text.encode()).hexdigest()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def digest(path: Path) -> str:
    return _digest(path, path.stat().st_mtime_ns)


@cache
def _digest(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range") or ""))
        if self.hub.status is not None:
            return self.fail(self.hub.status)
        if path.startswith("/api/"):
            return self.api(*path.split("/", 3)[2:])
        kind, path = ("datasets", path.removeprefix("/datasets")) if path.startswith("/datasets/") else ("models", path)
        name, _, rest = path.strip("/").partition("/resolve/")
        folder = self.folder(kind, name)
        if folder is None:
            return None
        revision, _, file = rest.partition("/")
        if not self.known(folder, revision):
            return self.fail(404, "RevisionNotFound")
        if not (folder / file).is_file():
            return self.fail(404, "EntryNotFound")
        return self.send_file(folder, folder / file)

    def folder(self, kind: str, name: str) -> Path | None:
        """The folder of a repository, or None once the error is sent."""
        found = self.hub.repositories.get((kind, name))
        if found is None:
            self.fail(404, "RepoNotFound")
            return None
        if name in self.hub.gated and "Authorization" not in self.headers:
            self.fail(403, "GatedRepo")
            return None
        return found

    def known(self, folder: Path, revision: str) -> bool:
        return revision in ("main", commit_of(folder))

    def api(self, kind: str, rest: str) -> None:
        name = "/".join(rest.split("/")[:2])
        tail = rest.removeprefix(name).strip("/")
        folder = self.folder(kind, name)
        if folder is None:
            return None
        what, _, revision = tail.partition("/")
        if revision and not self.known(folder, revision.strip("/")):
            return self.fail(404, "RevisionNotFound")
        entries = [self.entry(folder, path) for path in files_of(folder)]
        if what == "tree":
            return self.send_json([{"type": "file", "oid": entry["blobId"], **entry} for entry in entries])
        siblings = [{"rfilename": entry.pop("path"), **entry} for entry in entries]
        return self.send_json({"id": name, "sha": commit_of(folder), "siblings": siblings})

    def entry(self, folder: Path, path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        entry: dict[str, Any] = {"path": path.relative_to(folder).as_posix(), "size": size, "blobId": digest(path)[:40]}
        if size >= SMALL:
            entry["lfs"] = {"sha256": digest(path), "oid": digest(path), "size": size, "pointerSize": 134}
        return entry

    def send_file(self, folder: Path, path: Path) -> None:
        content = path.read_bytes()
        size, start = len(content), 0
        span = self.headers.get("Range")
        if span:
            start = int(span.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if span else 200)
        self.send_header("ETag", f'"{digest(path) if size >= SMALL else digest(path)[:40]}"')
        self.send_header("X-Repo-Commit", commit_of(folder))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(size - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = size
        if size >= SMALL and self.hub.cut_after:
            end = start + self.hub.cut_after.pop(0)
        self.wfile.write(content[start:end])
        if end < size:
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()

    def send_json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status: int, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """A running server without repositories."""
    hub = HubServer()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def go_online(hub: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points this process to the server, with an empty cache below `home`."""
    import huggingface_hub.constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "USE_MODELSCOPE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # set from conftest's variable on import


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
