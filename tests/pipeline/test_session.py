"""The order in which the clusters of a run start, and which of them end when the run fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from roll.configs.pipeline import BaseConfig, SFTConfig
from roll.distributed.calls.remote_errors import PROCESS_DIED, TIMEOUT, ClusterError
from roll.pipeline import session as module
from roll.pipeline.session import Session


class Starting:
    """A cluster that notes when its start begins and ends."""

    def __init__(self, role: str, devices: list[int], log: list[str]) -> None:
        self.role, self.log = role, log
        self.config = SimpleNamespace(device_mapping=devices)

    def initialize(self) -> Any:
        self.log.append(f"{self.role} starts")

        async def end() -> None:
            await asyncio.sleep(0)
            self.log.append(f"{self.role} is ready")

        return end()


def started(platform: str, infer: list[int], turns: bool = False) -> list[str]:
    """What happens while a session with both roles and a reference gets ready."""
    log: list[str] = []
    session = Session(BaseConfig(platform=platform))  # type: ignore[arg-type]
    clusters: Any = {role: Starting(role, [0, 1], log) for role in ("actor_train", "reference")}
    session.train_clusters, engines = clusters, Starting("actor_infer", infer, log)
    session.infer_clusters = {"actor_infer": engines}  # type: ignore[dict-item]
    if turns:

        async def engines_may_start() -> None:
            log.append("freed")

        session.shared_devices = SimpleNamespace(engines_may_start=engines_may_start)  # type: ignore[assignment]
    asyncio.run(session.ready())
    return log


@pytest.mark.parametrize("infer", [[0, 1], [1, 2]])
def test_an_engine_starts_once_the_training_ranks_on_its_gpu_hold_their_memory(infer: list[int]) -> None:
    log = started("cuda", infer)
    assert log.index("actor_infer starts") > max(map(log.index, ("actor_train is ready", "reference is ready")))
    assert log[-1] == "actor_infer is ready"


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_trainers_that_take_turns_free_the_devices_before_engines_on_gpus_start(platform: str) -> None:
    log = started(platform, [0, 1], turns=True)
    assert log.index("freed") > max(map(log.index, ("actor_train is ready", "reference is ready")))
    if platform == "cuda":
        assert log.index("freed") < log.index("actor_infer starts")


@pytest.mark.parametrize(("platform", "infer"), [("cpu", [0, 1]), ("cuda", [2, 3])])
def test_all_clusters_start_at_once_where_they_share_no_memory(platform: str, infer: list[int]) -> None:
    log = started(platform, infer)
    assert {line.rpartition(" ")[2] for line in log[:3]} == {"starts"} and len(log) == 6


class Running:
    """A cluster that runs until it is shut down; its engine 0 leaves its trainer unless `error` is set."""

    def __init__(self, role: str, log: list[str], error: ClusterError | None = None, engines: int = 1) -> None:
        self.role, self.log, self.error, self.world_size = role, log, error, engines

    async def cancel_calls(self) -> None:
        self.log.append(f"{self.role}: calls are cancelled")

    async def call(self, engines: list[int], method: Any, needs_weights: bool) -> None:
        if self.error is not None and engines == [0]:
            raise self.error
        self.log.append(f"{self.role}: {method.__name__}({needs_weights})")

    def shutdown(self) -> None:
        self.log.append(f"{self.role} ends")


def failed(role: str, kind: str = PROCESS_DIED) -> ClusterError:
    return ClusterError(role, "method", 0, kind, "gone")


async def end_of(
    session: Session,
    error: Exception | None,
    log: list[str],
    engine: ClusterError | None = None,
    lost_nodes: Sequence[int] = (),
    count: int = 1,
) -> None:
    """Leaves a running session with an error."""

    async def close() -> None:
        log.append("closed")

    session._running = True
    nodes: Any = SimpleNamespace(lost_nodes=lambda: lost_nodes, release=lambda: None)
    session._resources = nodes
    clusters: Any = {role: Running(role, log) for role in ("actor_train", "reference")}
    engines: Any = {"actor_infer": Running("actor_infer", log, engine, count), "judge": Running("judge", log)}
    session.train_clusters, session.infer_clusters = clusters, engines
    session.close_first(close)
    await session.__aexit__(None if error is None else type(error), error, None)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(module, "stop_ray", lambda: found.append("Ray ends"))
    return found


@pytest.mark.parametrize("role", ["actor_train", "reference", "rollouter"])
@pytest.mark.parametrize("kind", [PROCESS_DIED, TIMEOUT])
def test_engines_stay_where_a_run_whose_trainer_failed_may_start_again(log: list[str], role: str, kind: str) -> None:
    session = Session(BaseConfig())
    session.may_start_again = True
    asyncio.run(end_of(session, failed(role, kind), log))
    assert session.kept == {*session.infer_clusters} == {"actor_infer", "judge"} and not session.train_clusters
    assert log[:3] == ["closed", "actor_train ends", "reference ends"]
    assert {*log[3:5]} == {f"{role}: calls are cancelled" for role in session.kept}
    assert {*log[5:]} == {"actor_infer: leave_trainer(True)", "judge: leave_trainer(False)"}
    session.end()
    assert log[-3:] == ["actor_infer ends", "judge ends", "Ray ends"] and not session.kept
    session.end()
    assert log.count("Ray ends") == 1


def test_engines_that_answer_stay_where_another_engine_died_with_the_trainer(log: list[str]) -> None:
    session = Session(BaseConfig())
    session.may_start_again = True
    states: Any = SimpleNamespace(serving=[0, 1], started=[])
    session.monitors = {"actor_infer": states}
    asyncio.run(end_of(session, failed("actor_train"), log, failed("actor_infer"), count=3))
    assert session.kept == {"actor_infer", "judge"} and "actor_infer ends" not in log
    assert log.count("actor_infer: leave_trainer(True)") == 1, "engine 2 was down, so it is not called"
    assert session.down == {
        "actor_infer": {0: "actor_infer-0: its process died", 2: "it was down when the trainer failed"}
    }
    session.end()


@pytest.mark.parametrize(
    ("may_start_again", "error", "engine"),
    [
        (False, failed("actor_train"), None),
        (True, failed("actor_train", "ValueError"), None),
        (True, failed("actor_infer"), None),
        (True, failed("actor_train"), failed("actor_infer", TIMEOUT)),
        (True, RuntimeError("a defect"), None),
        (True, None, None),
    ],
    ids=["the last run", "not a process", "an engine failed", "an engine does not answer", "other error", "no error"],
)
def test_else_everything_ends(
    log: list[str], may_start_again: bool, error: Exception | None, engine: ClusterError | None
) -> None:
    session = Session(BaseConfig())
    session.may_start_again = may_start_again
    asyncio.run(end_of(session, error, log, engine))
    ended = {f"{role} ends" for role in ("actor_train", "reference", "actor_infer", "judge", "Ray")}
    assert not session.kept and not session.down and not session.clusters and ended <= {*log}


def test_with_a_lost_node_everything_ends_and_its_devices_are_reserved_anew(log: list[str]) -> None:
    session = Session(BaseConfig())
    session.may_start_again = True
    asyncio.run(end_of(session, failed("actor_train"), log, lost_nodes=[1]))
    assert not session.kept and "Ray ends" in log


@pytest.mark.parametrize("error", [None, failed("actor_train")])
def test_a_part_that_cannot_be_closed_does_not_keep_others_open(
    log: list[str], error: ClusterError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)

    async def broken() -> None:
        raise ValueError("cannot be closed")

    async def hanging() -> None:
        await asyncio.sleep(60)

    session = Session(BaseConfig())
    session.close_first(broken)
    session.close_first(hanging)
    with nullcontext() if error is not None else pytest.raises(ValueError, match="cannot be closed"):
        asyncio.run(end_of(session, error, log))
    assert log[0] == "closed" and log[-1] == "Ray ends"
    assert caplog.text.count("could not be closed") == (1 if error is None else 2)


def test_engines_that_take_turns_with_the_trainer_end_with_it(log: list[str]) -> None:
    session = Session(BaseConfig())
    session.may_start_again, session.shared_devices = True, SimpleNamespace()  # type: ignore[assignment]
    asyncio.run(end_of(session, failed("actor_train"), log))
    assert not session.kept and "actor_infer ends" in log


def test_engines_that_were_kept_end_with_the_next_run(log: list[str]) -> None:
    session = Session(BaseConfig())
    session.may_start_again = True
    asyncio.run(end_of(session, failed("actor_train"), log))
    asyncio.run(session.__aexit__(None, None, None))
    assert not session.kept and log[-3:] == ["actor_infer ends", "judge ends", "Ray ends"]


def test_kept_engines_do_not_start_again(log: list[str]) -> None:
    session = Session(BaseConfig())
    session.infer_clusters = {"actor_infer": Starting("actor_infer", [1], log)}  # type: ignore[dict-item]
    session.train_clusters = {"actor_train": Starting("actor_train", [0], log)}  # type: ignore[dict-item]
    session.kept = {"actor_infer"}
    asyncio.run(session.ready())
    assert log == ["actor_train starts", "actor_train is ready"]


def test_engines_and_remote_actors_that_are_ready_are_watched(tmp_path):
    async def watched() -> dict[str, psutil.Process]:
        session: Any = Session(SFTConfig(output_dir=str(tmp_path)))
        session.infer_clusters["actor_infer"] = SimpleNamespace(role="actor_infer", local_processes={1: own})
        session._remote_actors = [
            SimpleNamespace(name="rollouter", process=own),
            SimpleNamespace(name="b", process=None),
        ]
        watch = session.watch_processes()
        await watch.close()
        return watch._others()

    own = psutil.Process()
    assert asyncio.run(watched()) == {"actor_infer-1": own, "rollouter": own}
