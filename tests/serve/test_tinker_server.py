"""The server of Tinker's API without engines: requests that it cannot read, names, repeats, and the end of its run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from roll.base.errors import RunError
from roll.cli import main
from roll.serve.command import LOOPBACK, serve_run
from roll.serve.server import TinkerServer
from roll.serve.service import TinkerService

ROOT = Path(__file__).parents[2]


def run_in(folder: Path, why: str | None = None, step: int = 0) -> Any:
    """What the server reads of a run; with `why` the run has ended."""
    arguments = SimpleNamespace(trains_adapters=False)
    config = SimpleNamespace(
        pretrain="base", actor_train=SimpleNamespace(model_args=arguments), sequence_length=8, seed=1
    )
    return SimpleNamespace(config=config, folder=folder, step=step, version=0, tokenizer=[0] * 9, why_ended=lambda: why)


def answers(service: TinkerService, ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Asks a server on a free port."""

    async def play() -> None:
        server = TinkerServer(service)
        url = await server.start(socket.create_server((LOOPBACK, 0)))
        async with httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-API-Key": server.key}) as client:
            await ask(client)
        await server.stop()

    asyncio.run(play())


async def model_of(client: httpx.AsyncClient) -> str:
    session = (await client.post("/create_session", json={})).json()["session_id"]
    fields = {"session_id": session, "base_model": "base", "model_seq_id": 0}
    broken = await client.post("/create_model", json=fields | {"optimizer_config": [1]})
    assert broken.status_code == 400 and "AttributeError" in broken.json()["error"]
    created = (await client.post("/create_model", json=fields)).json()["request_id"]
    model: str = (await client.post("/retrieve_future", json={"request_id": created})).json()["model_id"]
    return model


def test_a_request_that_cannot_be_read_is_the_clients_error_and_names_of_states_are_file_names(tmp_path: Path) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        model = await model_of(client)
        for name in ("a:b", "a/b", "", "x" * 129):
            refused = await client.post("/save_weights", json={"model_id": model, "seq_id": 1, "path": name})
            assert refused.status_code == 400 and "use up to 128 letters, digits" in refused.json()["error"]

    answers(TinkerService(run_in(tmp_path)), ask)


def test_a_state_that_is_saved_again_by_a_repeated_request_is_saved_once(tmp_path: Path) -> None:
    saved = []

    async def save_state_async() -> Path:
        saved.append(folder := tmp_path / f"step-{len(saved):06d}")
        folder.mkdir()
        return folder

    async def ask(client: httpx.AsyncClient) -> None:
        model = await model_of(client)
        for number, message in ((1, None), (1, None), (2, "exists; choose another name, or give overwrite")):
            asked = await client.post("/save_weights", json={"model_id": model, "seq_id": number, "path": "best"})
            answer = (await client.post("/retrieve_future", json=asked.json())).json()
            assert message in answer["error"] if message else answer["path"].endswith("/weights/best")

    run = run_in(tmp_path)
    run.save_state_async = save_state_async
    answers(TinkerService(run), ask)
    assert len(saved) == 1


def test_trained_weights_of_a_resumed_run_are_not_the_base_model(tmp_path: Path) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        session = (await client.post("/create_session", json={})).json()["session_id"]
        asked = await client.post("/create_sampling_session", json={"session_id": session, "base_model": "base"})
        assert "its weights have been trained" in asked.json()["error"]

    answers(TinkerService(run_in(tmp_path, step=3)), ask)


def test_the_server_ends_with_its_run(tmp_path: Path) -> None:
    run = run_in(tmp_path, "the run has ended: a rank died; open it again")
    with pytest.raises(RunError, match="a rank died"):
        asyncio.run(serve_run(run, socket.create_server((LOOPBACK, 0))))


@pytest.mark.parametrize("taken", [True, False])
def test_an_address_that_cannot_be_used_is_named_before_a_process_starts(
    taken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("roll.api.open.open_run", lambda *_: pytest.fail("it started"))
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1] if taken else 70_000
        assert main(["serve", str(ROOT / "examples/tinker/serve_config.yaml"), "--port", str(port)]) == 2
    assert f"{LOOPBACK}:{port}: " in capsys.readouterr().err
