"""The address of a Ray to join, the folder and token of a Ray of one's own, and what is left of one that fails."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import utils as ray_utils
from ray.exceptions import RaySystemError

from roll.configs.pipeline import BaseConfig
from roll.distributed import ray_session
from roll.distributed.leftovers import PREFIX
from roll.distributed.ray_session import (
    HTTP2_SETTINGS,
    TOKEN,
    TOKEN_FILE,
    RayStartError,
    RunRay,
    probe_address,
    ray_address,
    start_ray,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for Ray's files; nothing about a Ray to join."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


@pytest.mark.parametrize("value", ["", " ", "local"])
def test_a_run_starts_its_own_ray_where_the_address_names_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", value)
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    start_ray(BaseConfig(), "cpu", 2)
    ray_session.stop_ray()
    assert started[0]["address"] == "local" and started[0]["_node_ip_address"] == "127.0.0.1"
    with pytest.raises(RaySystemError, match="not been started"):
        ray.put(0)
    assert len(started) == 1, "a call after the end of Ray starts no other one"


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "head:6379", "[::1]:6379", "[fe80::1%eth0]:6379"])
def test_an_address_is_a_host_and_a_port(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f" {address}\n")
    assert ray_address() == address


@pytest.mark.parametrize(
    "address",
    ["nowhere", ":6379", "head:", "::1:6379", "[::1]", "head:70000", "head:0", "ray://head:10001", "http://head:8265"],
)
def test_other_forms_of_an_address_are_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RayStartError, match="is not HOST:PORT of a `ray start --head`"):
        ray_address()


def test_auto_is_the_ray_that_was_started_on_this_machine(monkeypatch: pytest.MonkeyPatch, environment: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(RayStartError, match="RAY_ADDRESS=auto: no Ray was started with `ray start`"):
        ray_address()
    (environment / "ray").mkdir()
    (environment / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    with pytest.raises(RayStartError, match=r"no Ray answers at RAY_ADDRESS=127.0.0.1:1 \(Connection refused\)"):
        start_ray(BaseConfig(), "cpu", 2)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (bytes(3) + HTTP2_SETTINGS, None),
        (b"HTTP/1.1 400 Bad Request", "another program listens there"),
        (b"", "no answer within 0.5 s"),
    ],
    ids=["gRPC", "HTTP", "stopped"],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_a_program_that_speaks_the_protocol_of_ray_is_joined(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, problem: str | None, host: str
) -> None:
    monkeypatch.setattr(ray_session, "PROBE_TIMEOUT_S", 600.0 if answer else 0.5)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(4096)
                ended.wait()

        ended = threading.Event()
        serving = threading.Thread(target=serve)
        serving.start()
        address = f"{f'[{host}]' if ':' in host else host}:{server.getsockname()[1]}"
        try:
            if problem is None:
                probe_address(address)
            else:
                with pytest.raises(RayStartError, match=problem):
                    probe_address(address)
        finally:
            ended.set()
            serving.join()


def test_a_name_that_is_looked_up_forever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "PROBE_TIMEOUT_S", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [] if ended.wait(10) else [])
    with pytest.raises(RayStartError, match="no answer within 0.2 s"):
        probe_address("head:6379")
    ended.set()


def test_the_folder_and_the_token_of_a_run_are_closed_to_other_users(environment: Path) -> None:
    before = os.umask(0)
    try:
        own = RunRay()
    finally:
        os.umask(before)
    [folder] = environment.glob(f"{PREFIX}*")
    token = Path(os.environ[TOKEN_FILE])
    assert own.folder.parent == token.parent == folder
    assert folder.stat().st_mode & 0o777 == 0o700 and token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64 and TOKEN not in os.environ
    own.end()
    assert not folder.exists() and TOKEN_FILE not in os.environ


def test_a_token_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "of the user")
    own = RunRay()
    assert TOKEN_FILE not in os.environ
    own.end()
    assert os.environ[TOKEN] == "of the user"


@pytest.mark.parametrize(("mode", "closed"), [(0o644, 0o600), (0o600, 0o600)])
def test_the_token_that_ray_wrote_is_closed_to_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, closed: int
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(mode)
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_session._close_token_file()
    assert token.stat().st_mode & 0o777 == closed


def test_a_ray_that_does_not_start_leaves_nothing(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        Path(options["_temp_dir"], "session_2026").mkdir(parents=True)
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RayStartError, match="cannot start Ray on this machine .*timed out"):
        start_ray(BaseConfig(), "cpu", 2)
    assert not list(environment.iterdir()) and TOKEN_FILE not in os.environ


def test_a_signal_while_ray_starts_is_left_to_the_handler_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets handlers of its own, in Python and then in C, which end the process."""
    received: list[int] = []

    def make_core_worker() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    def init(**_: Any) -> None:
        ray_utils.set_sigterm_handler(signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
        ray_session._raylet.CoreWorker()

    monkeypatch.setattr(ray_session._raylet, "CoreWorker", make_core_worker)
    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        start_ray(BaseConfig(), "cpu", 2)
        ray_session.stop_ray()
        assert received == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
