"""Trainer and engines take turns on shared devices: what leaves does so before anything else is loaded."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from roll.distributed.infer.infer_worker import CACHE, WEIGHTS
from roll.distributed.shared_devices import SharedDevices
from roll.distributed.train.host_copies import ALL_STATES

SIZES = {"parameters": 2, "gradients": 4, "optimizer": 12, WEIGHTS: 2, CACHE: 9}
TURNS = ("to_trainer", "to_update", "to_engines")
PEAK = {"to_trainer": 2 + 4 + 12 + 2, "to_update": 2 + 2, "to_engines": 2 + 9}


class Devices:
    """The memory of the devices, and the calls that change it; a call can fail half-way."""

    def __init__(self) -> None:
        self.held = {("actor_train", state) for state in ALL_STATES} | {("reference", "parameters")}
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.peak = 0

    @property
    def bytes(self) -> int:
        return sum(SIZES[what] for _, what in self.held)


class Role:
    """A cluster whose calls change what is on the devices; loading takes its time."""

    def __init__(self, name: str, devices: Devices) -> None:
        self.name, self.devices = name, devices

    async def call(self, ranks: None, method: Any, argument: Any) -> None:
        name, devices = method.__name__, self.devices
        devices.calls.append(f"{self.name} {name} {argument if isinstance(argument, str) else ' '.join(argument)}")
        for what in () if name == "pause" else argument:
            if name in ("load_states", "resume_memory"):
                await asyncio.sleep(0)
                devices.held.add((self.name, what))
            else:
                devices.held.discard((self.name, what))
            devices.peak = max(devices.peak, devices.bytes)
            if name in devices.fails:
                devices.fails.remove(name)
                raise RuntimeError(f"{self.name} {name} failed")


def shared(policy: Any = "abort_resume") -> tuple[SharedDevices, Devices]:
    devices = Devices()
    roles: list[Any] = [Role(name, devices) for name in ("actor_train", "reference", "actor_infer")]
    made = SharedDevices(roles[0], [roles[1]], roles[2], policy)
    asyncio.run(made.engines_may_start())
    assert devices.bytes == 0
    devices.held = {("actor_infer", WEIGHTS), ("actor_infer", CACHE)}
    devices.calls.clear()
    return made, devices


def take(made: SharedDevices, turn: str) -> None:
    asyncio.run(getattr(made, turn)())


def test_the_calls_of_one_step() -> None:
    made, devices = shared()
    for turn in TURNS:
        take(made, turn)
        take(made, turn)
    assert devices.calls == [
        "actor_infer pause abort_resume",
        f"actor_infer release_memory {CACHE} {WEIGHTS}",
        "actor_train load_states gradients optimizer parameters",
        "reference load_states parameters",
        "actor_train offload_states gradients optimizer",
        "reference offload_states parameters",
        f"actor_infer resume_memory {WEIGHTS}",
        "actor_train offload_states parameters",
        f"actor_infer resume_memory {CACHE}",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_phase_needs_more_than_its_own_memory_in_any_order_and_after_failures(seed: int) -> None:
    (made, devices), draws = shared(), random.Random(seed)
    before = devices.bytes
    for _ in range(40):
        turn = draws.choice(TURNS)
        if draws.random() < 0.3:
            devices.fails = {draws.choice(["load_states", "offload_states", "resume_memory", "release_memory"])}
        devices.peak = 0
        try:
            take(made, turn)
        except RuntimeError:
            devices.fails.clear()
            before, turn = devices.bytes, draws.choice(TURNS)  # a retry may ask for another phase
            devices.peak = 0
            take(made, turn)
        devices.fails.clear()
        assert devices.bytes == PEAK[turn]
        assert devices.peak <= max(before, PEAK[turn])
        before = devices.bytes


@pytest.mark.parametrize(("policy", "mode"), [("in_place", "abort_resume"), ("drain", "drain"), ("retract", "retract")])
def test_requests_leave_the_cache_before_it_is_freed_as_the_policy_says(policy: str, mode: str) -> None:
    made, devices = shared(policy)
    take(made, "to_trainer")
    assert devices.calls[0] == f"actor_infer pause {mode}"


def test_running_requests_are_interrupted_where_the_run_ends() -> None:
    made, devices = shared("drain")
    asyncio.run(made.to_trainer(finish_requests=False))
    assert devices.calls[0] == "actor_infer pause abort_resume"


def test_the_weights_are_sent_first_with_an_empty_cache() -> None:
    """At the start of a run the engines hold everything and the trainer nothing."""
    made, devices = shared()
    take(made, "to_update")
    assert devices.calls == [
        "actor_infer pause abort_resume",
        f"actor_infer release_memory {CACHE}",
        "actor_train load_states parameters",
    ]
