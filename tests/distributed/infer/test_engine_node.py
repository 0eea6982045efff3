"""The nodes of one engine start and end together. The engine and the actors are stand-ins that fail on request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from roll.distributed.calls.remote_errors import Failure
from roll.distributed.infer.engine_node import FurtherNodes
from roll.distributed.infer.sglang_engine import EngineError
from roll.distributed.worker import WorkerRank
from tests.processes import PATIENCE_S


@dataclass
class Engine:
    """The part on the first node; its start takes `seconds`, or fails."""

    seconds: float = 0.0
    fails: bool = False
    running: bool = False
    calls: list[str] = field(default_factory=list)

    async def start(self, arguments: dict[str, Any], timeout_s: float) -> None:
        self.calls.append(arguments["dist_init_addr"])
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise EngineError("actor_infer-0: no memory")
        self.running = True

    def end(self) -> None:
        self.running = False
        self.calls.append("end")


@dataclass
class Node:
    """The actor of a further node, with an answer for each method."""

    answers: dict[str, Any]
    calls: list[str] = field(default_factory=list)

    @property
    def call(self) -> Node:
        return self

    def remote(self, method: str, keep: bool, *_: Any) -> Node:
        self.calls.append(method)
        self._answer = self.answers.get(method)
        return self

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self._answer, Exception):
            future.set_exception(self._answer)
        elif self._answer != "never":
            future.set_result(self._answer)
        return future


def nodes(*actors: Node) -> tuple[FurtherNodes, list[str]]:
    causes: list[str] = []
    rank = replace(WorkerRank("actor_infer"), further_nodes=tuple(enumerate(actors, start=3)))
    return FurtherNodes(rank, causes.append), causes


FAILED = Failure(0, 0.0, "EngineError", "SGLang did not start: port in use", "")


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_further_node_that_does_not_start_ends_all_nodes_and_is_named(seconds: float) -> None:
    engine, sound, broken = Engine(seconds), Node({}), Node({"start": FAILED})
    with pytest.raises(EngineError, match="actor_infer-0 on node 4: SGLang did not start: port in use"):
        asyncio.run(nodes(sound, broken)[0].start(engine, "10.0.0.1:20000", 60.0))  # type: ignore[arg-type]
    assert not engine.running and engine.calls[-1] == "end"
    assert sound.calls == broken.calls == ["start", "stop"]


def test_a_first_node_that_does_not_start_ends_the_others() -> None:
    engine, other = Engine(fails=True), Node({"start": "never"})
    with pytest.raises(EngineError, match="actor_infer-0: no memory"):
        asyncio.run(nodes(other)[0].start(engine, "10.0.0.1:20000", 60.0))  # type: ignore[arg-type]
    assert other.calls == ["start", "stop"]


def test_a_node_without_an_answer_is_waited_for_so_long_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll.distributed.infer.engine_node.STOP_TIMEOUT_S", 0.05)
    engine, silent = Engine(), Node({"start": "never", "stop": "never"})
    with pytest.raises(EngineError, match="actor_infer-0 on node 3: start: no answer within 0.1 s"):
        asyncio.run(asyncio.wait_for(nodes(silent)[0].start(engine, "10.0.0.1:20000", 0.05), PATIENCE_S))  # type: ignore[arg-type]
    assert not engine.running and silent.calls == ["start", "stop"]


def test_the_death_of_a_further_node_is_the_engines_and_names_the_node() -> None:
    async def run(answer: Any) -> list[str]:
        further, causes = nodes(Node({"death": answer}))
        await further.start(Engine(), "10.0.0.1:20000", 60.0)  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        further.stop_watching()
        return causes

    assert asyncio.run(run("node 3: process 7 of the engine died")) == ["node 3: process 7 of the engine died"]
    assert asyncio.run(run(RuntimeError("the actor is dead"))) == ["actor_infer-0 on node 3: the actor is dead"]
    assert asyncio.run(run("never")) == []
