"""Who fails when something fails, over workers without processes; tests/integration/test_env_pool.py has real ones."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from env_workers import FakeWorker, JumpingLoop, Workers
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.pipeline.agentic.environments import EnvFailure, EnvPool, EnvSpec, EnvWorkerError, Stepped

STEP_TIMEOUT_S = 10.0
PLAIN = EnvSpec("plain", {})


def pool_of(workers: Workers, count: int, **options: Any) -> EnvPool:
    return EnvPool(count, STEP_TIMEOUT_S, 30.0, launch=workers.launch, **options)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(coroutine)


class Player:
    """One environment beside what should become of it."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.seed = env, seed
        self.steps = 0
        self.doom: str | None = None
        self.call: asyncio.Task[Stepped] | None = None

    @property
    def idle(self) -> bool:
        return self.call is None and self.doom is None

    async def finish(self) -> str | None:
        """The reason of the failure of the open call, which must be the expected one."""
        if self.call is None:
            return None
        call, self.call = self.call, None
        try:
            stepped = await call
        except EnvFailure as failure:
            assert failure.reason == self.doom, str(failure)
            assert f"environment plain with seed {self.seed}, turn {self.steps + 1}: " in str(failure)
            return failure.reason
        assert self.doom is None
        self.steps += 1
        assert stepped.observation.startswith(f"{self.seed} after {self.steps} with ")
        return None


class Script:
    """Plays drawn events on a pool and says of each environment beforehand what becomes of it."""

    def __init__(self, size: int) -> None:
        self.workers = Workers(before_exit=self.doom_all_in_calls_on)
        self.pool = pool_of(self.workers, size)
        self.players: list[Player] = []
        self.failures: Counter[str] = Counter()
        self.seeds = 0

    async def happen(self, event: str, pick: int) -> None:
        idle = [player for player in self.players if player.idle]
        player = idle[pick % len(idle)] if idle else None
        if event == "open":
            self.seeds += 1
            env, opened = await self.pool.open(PLAIN, self.seeds)
            assert opened.observation == f"{self.seeds}"
            self.players.append(Player(env, self.seeds))
        elif event == "kill":
            worker = self.workers.alive[pick % len(self.workers.alive)]
            self.doom_all_in_calls_on(worker)
            worker.die()
            await self.calm()
        elif event == "settle":
            await self.settle()
        elif player is None:
            return
        elif event == "close":
            self.players.remove(player)
            await player.env.close()
        else:
            await self.step(player, event)

    async def step(self, player: Player, action: str) -> None:
        player.call = asyncio.create_task(player.env.step(action))
        player.doom = {"raise": "env_raised", "hang": "env_hung", "exit": "env_died"}.get(action)
        if action in ("go", "raise", "exit"):
            await self.note(player)
        await self.calm()

    async def calm(self) -> None:
        """Lets what is due happen; time stands still."""
        for _ in range(20):
            await asyncio.sleep(0)

    def doom_all_in_calls_on(self, worker: FakeWorker) -> None:
        seeds = {env[0] for env in worker.envs.values()}
        for player in self.players:
            if player.seed in seeds and player.call is not None:
                player.doom = "env_died"

    async def note(self, player: Player) -> None:
        reason = await player.finish()
        if reason is not None:
            self.failures[reason] += 1

    async def settle(self) -> None:
        """Answers what waits, lets what hangs pass its deadline, and sees to it that each came out as it should."""
        for worker in self.workers.all:
            worker.settle()
        for player in self.players:
            await self.note(player)
        self.players = [player for player in self.players if player.doom is None]
        assert self.pool.failures == self.failures


@settings(max_examples=600, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.sampled_from(["open", "open", "go", "go", "wait", "raise", "hang", "exit", "kill", "close", "settle"]),
            st.integers(0, 50),
        ),
        max_size=50,
    ),
)
def test_an_environment_fails_only_by_itself_or_with_its_process(size: int, events: list[tuple[str, int]]) -> None:
    async def play() -> None:
        script = Script(size)
        await script.pool.start()
        for event, pick in events:
            await script.happen(event, pick)
        await script.settle()
        for player in script.players:
            await player.env.step("go")
            await player.env.close()
        await script.calm()
        assert len(script.workers.alive) == size, "retired workers are killed once empty, dead ones are replaced"
        assert not any(worker.envs for worker in script.workers.alive)
        script.pool.close()
        assert all(worker.joined for worker in script.workers.all)

    run(play())


def test_a_process_that_an_environment_ends_takes_those_in_a_call_and_spares_the_others() -> None:
    async def play() -> None:
        workers = Workers()
        pool = pool_of(workers, 1)
        (guilty, _), (waiting, _), (idle, _) = [await pool.open(PLAIN, seed) for seed in range(3)]
        await idle.step("go")
        call = asyncio.create_task(waiting.step("wait"))
        await asyncio.sleep(0)
        with pytest.raises(EnvFailure, match="seed 0, turn 1: worker 0 died: it was told to"):
            await guilty.step("exit")
        with pytest.raises(EnvFailure, match="seed 1, turn 1: worker 0 died"):
            await call
        assert (await idle.step("go")).observation == "2 after 2 with go"
        assert pool.failures == {"env_died": 2}
        pool.close()

    run(play())


def test_an_episode_that_cannot_be_repeated_is_not_gone_on_with() -> None:
    async def play() -> None:
        workers = Workers()
        pool = pool_of(workers, 1)
        env, _ = await pool.open(EnvSpec("drifting", {}), 5)
        workers.all[0].die()
        await asyncio.sleep(0)
        with pytest.raises(EnvFailure, match="it is not repeatable; reset gave .*5 on 1.* after .*5 on 0"):
            await env.step("go")
        assert pool.failures == {"env_died": 1}
        assert not workers.all[1].envs
        with pytest.raises(RuntimeError, match="has failed"):
            await env.step("go")
        pool.close()

    run(play())


def test_a_reset_that_raises_or_hangs_fails_alone() -> None:
    async def play() -> None:
        workers = Workers()
        pool = pool_of(workers, 1)
        with pytest.raises(EnvFailure, match=r"seed 1, reset: ValueError: no \(env.py:1 in reset\)"):
            await pool.open(EnvSpec("raise", {}), 1)
        with pytest.raises(
            EnvFailure, match="seed 2, reset: no answer within step_timeout_s = 10; worker 0 is retired"
        ):
            await pool.open(EnvSpec("hang", {}), 2)
        await asyncio.sleep(0)
        assert workers.all[0].killed and len(workers.alive) == 1
        pool.close()

    run(play())


def test_a_step_is_one_call() -> None:
    async def play() -> None:
        workers = Workers()
        pool = pool_of(workers, 1)
        env, _ = await pool.open(PLAIN, 1)
        before = workers.all[0].calls
        for _ in range(10):
            await env.step("go")
        assert workers.all[0].calls == before + 10
        pool.close()

    run(play())


def test_who_is_cancelled_in_a_call_leaves_an_environment_that_can_be_closed() -> None:
    async def play() -> None:
        workers = Workers()
        pool = pool_of(workers, 1)
        env, _ = await pool.open(PLAIN, 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(env.step("hang"), 1.0)
        with pytest.raises(RuntimeError, match="still in a call"):
            await env.step("go")
        await env.close()
        await env.close()
        assert pool.failures == {"env_hung": 1}
        assert workers.all[0].killed
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.open(EnvSpec("wait", {}), 2), 1.0)
        workers.all[1].settle()
        await asyncio.sleep(1.0)
        assert not workers.all[1].envs and pool.failures == {"env_hung": 1}
        pool.close()

    run(play())


def test_a_full_pool_says_so_and_has_room_again() -> None:
    async def play() -> None:
        pool = pool_of(Workers(), 2, capacity=1)
        (first, _), _ = [await pool.open(PLAIN, seed) for seed in range(2)]
        with pytest.raises(EnvWorkerError, match="use more workers"):
            await pool.open(PLAIN, 3)
        await first.close()
        await pool.open(PLAIN, 4)
        pool.close()

    run(play())


def test_workers_that_do_not_start_are_named() -> None:
    class Slow(FakeWorker):
        async def ready(self) -> None:
            await asyncio.sleep(31.0 if self.number == 1 else 0.0)

    class SlowWorkers(Workers):
        made_of = Slow

    async def play() -> None:
        workers = SlowWorkers()
        pool = pool_of(workers, 2)
        with pytest.raises(EnvWorkerError, match="^environment worker 1 was not up within start_timeout_s = 30$"):
            await pool.start()
        assert workers.all[1].killed
        pool.close()

    run(play())


def test_closing_ends_what_waits_and_lets_nothing_begin() -> None:
    async def play() -> None:
        pool = pool_of(Workers(), 1)
        env, _ = await pool.open(PLAIN, 1)
        call = asyncio.create_task(env.step("hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pool.close()
        pool.close()
        with pytest.raises(EnvFailure, match="the pool was closed"):
            await call
        await env.close()
        with pytest.raises(RuntimeError, match="is closed"):
            await pool.open(PLAIN, 2)
        assert not pool.failures

    run(play())


def test_a_failure_travels_between_processes() -> None:
    failure = pickle.loads(pickle.dumps(EnvFailure("env_hung", "why")))
    assert (failure.reason, str(failure)) == ("env_hung", "why")
