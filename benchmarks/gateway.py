"""What agents pay for the gateway: its sessions against the same episodes in environments of this process.

    python -m benchmarks.gateway --json FILE

64 sessions at a time send 8 requests of 20 tokens each, on one engine. Their clients are coroutines of one other
process that speak HTTP, so that what is measured is the gateway and not a client library. Memory is that of sessions
which a scripted policy answered.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from benchmarks.agentic_rollout import RECIPE, LocalEngine, TimeSums
from benchmarks.common import Measurement, at_least, at_most, main
from roll.envs import TextEnv, Turn

if TYPE_CHECKING:
    from roll.configs.agentic import AgenticConfig
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.gateway.session import Dialogue
    from roll.rollout.agents.sessions import SessionAddress, SessionEnd, SessionSpec

SESSIONS, REQUESTS, TOKENS, REPEATS = 64, 8, 20, 3
OPEN_SESSIONS = 2000
QUESTION = "How far is it from here?"


class Questions(TextEnv):
    """Asks the same as often as a session sends requests."""

    def rules(self) -> str:
        return ""

    def begin(self) -> str:
        return QUESTION

    def act(self, text: str) -> Turn:
        return Turn(QUESTION, 0.0, self.steps == REQUESTS)


def measure() -> Measurement:
    """Sessions per minute against episodes per minute, the gateway's own time, its memory, and the use of the cache."""
    with tempfile.TemporaryDirectory() as folder:
        raw = asyncio.run(compare(write_recipe(Path(folder))))
        raw["open_sessions_mib"] = memory_of_sessions(Path(folder) / "base")
    checks = [
        at_least("gateway: sessions per minute over episodes in-process", raw["of_in_process"], 0.8),
        at_most("gateway: own time of a request, median, ms", raw["own_ms_p50"], 2.0),
        at_most("gateway: own time of a request, 99th percentile, ms", raw["own_ms_p99"], 10.0),
        at_most(f"gateway: memory of {OPEN_SESSIONS} open sessions, MiB", raw["open_sessions_mib"], 300.0),
        at_most("gateway: tokens computed again in append-only sessions", raw["context_tokens_repeated"], 0.0),
        at_least("gateway: cached part of the tokens sent before", raw["cached_fraction"], 0.95),
    ]
    return raw, checks


def write_recipe(folder: Path) -> Path:
    """Writes model and configuration below `folder`; returns the configuration."""
    from examples.tiny_math.prepare import prepare

    prepare(folder / "base")
    questions = {"env_type": "benchmarks.gateway:Questions", "max_steps": REQUESTS, "agent_system_template": None}
    questions |= {"agent_template": "{observation}"}
    tree = RECIPE | {"pretrain": str(folder / "base"), "output_dir": str(folder / "run")}
    tree |= {"custom_envs": {"Questions": questions}, "max_tokens_per_step": TOKENS, "sequence_length": 1024}
    infer = RECIPE["actor_infer"] | {"generating_args": {}}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree | {"actor_infer": infer}))
    return file


async def compare(file: Path) -> dict[str, Any]:
    """Plays the same number of episodes in both ways alternately, once more to warm up."""
    from roll.configs.agentic import AgenticConfig
    from roll.distributed.infer.infer_worker import InferWorker
    from roll.distributed.ray_session import start_ray, stop_ray
    from roll.distributed.worker import WorkerRank
    from roll.loading.load import load_config

    os.environ["OMP_NUM_THREADS"] = "1"
    config = load_config(file, ["actor_infer.strategy_args.strategy_config.load_format=auto"])
    assert isinstance(config, AgenticConfig)
    start_ray(config, "cpu", 1)
    engine = InferWorker(WorkerRank("actor_infer"), config.actor_infer, config)
    try:
        await engine.initialize()
        return await _compare(config, engine)
    finally:
        engine.close()
        stop_ray()


async def _compare(config: AgenticConfig, engine: InferWorker) -> dict[str, Any]:
    from roll.pipeline.kinds.agentic import AgenticPipeline, make_dialogue
    from roll.pipeline.session import Session
    from roll.rollout.engine_pool import EnginePool
    from roll.rollout.ledger import PromptRequest

    pipeline = AgenticPipeline(config)
    await pipeline.prepare()
    pool = EnginePool(LocalEngine(engine), 0, config.actor_infer.max_running_requests)
    worker = pipeline.worker_factory(Session(config), own_process=False)(pool)
    groups = SESSIONS // config.train_env_manager.group_size
    clients, seconds = Clients(), {"in-process": 0.0, "gateway": 0.0}
    ends: list[SessionEnd] = []
    for repeat in range(REPEATS + 1):
        await engine.flush_cache()
        start = time.perf_counter()
        drawn = worker.draw([PromptRequest(repeat * groups + number, 0, 0) for number in range(groups)])
        await worker.generate(drawn, "train", TimeSums())
        middle = time.perf_counter()
        await engine.flush_cache()
        dialogue = make_dialogue(config, {})
        found, serving = await play(clients, dialogue, pool, config, repeat)
        if repeat:
            seconds["in-process"] += middle - start
            seconds["gateway"] += serving
            ends += found
    worker.close()
    clients.close()
    own = sorted(1000 * value for end in ends for value in end.seconds)
    turns = [turn for end in ends if end.trajectory for turn in end.trajectory.turns]
    return {
        "sessions_per_minute": {name: 60 * REPEATS * SESSIONS / spent for name, spent in seconds.items()},
        "of_in_process": seconds["in-process"] / seconds["gateway"],
        "own_ms_p50": statistics.median(own),
        "own_ms_p99": own[int(0.99 * (len(own) - 1))],
        "context_tokens_repeated": sum(end.metrics["context_tokens_repeated"] for end in ends),
        "cached_fraction": sum(min(turn.cached, turn.reusable) for turn in turns)
        / sum(turn.reusable for turn in turns),
    }


async def play(
    clients: Clients, dialogue: Dialogue, pool: Any, config: AgenticConfig, repeat: int
) -> tuple[list[SessionEnd], float]:
    """What the sessions leave, and the seconds in which they were open."""
    from roll.gateway.server import GatewayServer

    async def generate(requests: Sequence[Any], engine: int | None) -> list[Any]:
        [results] = await pool.generate([list(requests)], engine)
        return list(results)

    server = GatewayServer(dialogue, generate)
    await server.start()
    start = time.perf_counter()
    addresses = [await server.open(spec(config, f"train-{repeat}-{number}")) for number in range(SESSIONS)]
    await asyncio.to_thread(clients.play, addresses)
    ends = [await server.finish(address) for address in addresses]
    seconds = time.perf_counter() - start
    await server.stop()
    return ends, seconds


def spec(config: AgenticConfig, name: str) -> SessionSpec:
    from roll.rollout.agents.sessions import SessionSpec
    from roll.rollout.types import SamplingParams

    sampling = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(1,))
    return SessionSpec(name, config.seed, 0, sampling, config.sequence_length or 0)


class Clients:
    """Clients of sessions, in a process of their own."""

    def __init__(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve_clients, args=(other,), daemon=True)
        self._process.start()

    def play(self, addresses: Sequence[SessionAddress]) -> None:
        """Plays the sessions concurrently, to their ends."""
        self._connection.send([(address.base_url, address.key) for address in addresses])
        if (error := self._connection.recv()) is not None:
            raise RuntimeError(error)

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def serve_clients(connection: Connection) -> None:
    """Plays what arrives until None does."""
    while (addresses := connection.recv()) is not None:
        try:
            asyncio.run(_play_all(addresses))
            connection.send(None)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


async def _play_all(addresses: Sequence[tuple[str, str]]) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(_play_one(http, *address) for address in addresses))


async def _play_one(http: Any, base_url: str, key: str) -> None:
    messages: list[dict[str, Any]] = []
    for _ in range(REQUESTS):
        messages.append({"role": "user", "content": QUESTION})
        body, headers = {"model": "policy", "messages": messages}, {"Authorization": f"Bearer {key}"}
        async with http.post(f"{base_url}/chat/completions", json=body, headers=headers) as answer:
            found = json.loads(await answer.read())
        if "choices" not in found:
            raise RuntimeError(str(found))
        messages.append(found["choices"][0]["message"])


def memory_of_sessions(model: Path) -> float:
    """MiB by which open sessions, each with the requests of a whole one, make a process grow."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(partial(_memory, str(model)))


def _memory(model: str) -> float:
    from roll.datasets.templates import ConversationEncoder
    from roll.datasets.tokenizer import load_tokenizer, response_text
    from roll.gateway.protocol import read_request
    from roll.gateway.session import AgentSession, Dialogue
    from roll.rollout.agents.sessions import SessionSpec
    from roll.rollout.types import GenerateResult, SamplingParams

    tokenizer = load_tokenizer(model)
    dialogue = Dialogue(ConversationEncoder(tokenizer, "native"), partial(response_text, tokenizer))
    sampling, sessions = SamplingParams(max_new_tokens=TOKENS, stop_token_ids=(1,)), []
    before = 0
    for number in range(OPEN_SESSIONS + 1):
        session, messages = AgentSession(SessionSpec(f"train-{number}-0", 1, 0, sampling, 4096), dialogue), []
        for _ in range(REQUESTS):
            messages.append({"role": "user", "content": QUESTION})
            turn = session.ask(read_request({"messages": messages}))
            ids = [1000 + number + at for at in range(TOKENS - 1)]
            drawn = [3 + (each % 200) for each in ids]
            result = GenerateResult(
                "r", [*drawn, 1], [-0.5 - each / 1e6 for each in range(TOKENS)], [0] * TOKENS, "stop"
            )
            messages.append(dict(session.answer(turn, [result]).choices[0].message))
        sessions.append(session)
        if number == 0:
            before = psutil.Process().memory_info().rss
    return float(psutil.Process().memory_info().rss - before) / 2**20


if __name__ == "__main__":
    main(measure, __doc__ or "")
