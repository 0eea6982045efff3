"""Devices that trainer and engines share: each state of a role is on them only while it is used there.

    engines       generate, with weights and key-value cache
    trainer       computes log-probs and gradients, with parameters, gradients and optimizer; so does a critic
    update        sends parameters to the engines' weights

The states that the next phase does not use are offloaded before others are loaded, so the devices never hold more than
one phase needs. An engine discards its weights instead: only a weight update makes it serve again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from roll.configs.asynchronous import InFlightPolicy
from roll.distributed.calls.remote_call import ALL
from roll.distributed.cluster import Cluster
from roll.distributed.infer.infer_worker import CACHE, WEIGHTS, InferWorker
from roll.distributed.train.host_copies import ALL_STATES, StateKind
from roll.distributed.train.train_worker import TrainWorker


@dataclass(frozen=True)
class Held:
    """What is on the devices: states of actor_train, of a critic, of the frozen roles, and of the engines."""

    trained: frozenset[StateKind] = frozenset()
    critic: frozenset[StateKind] = frozenset()
    frozen: frozenset[StateKind] = frozenset()
    engines: frozenset[str] = frozenset()

    def __and__(self, other: Held) -> Held:
        return Held(*(getattr(self, item.name) & getattr(other, item.name) for item in fields(Held)))


class Phase(Enum):
    """What the devices are used for; the value is what is on them."""

    ENGINES = Held(engines=frozenset({WEIGHTS, CACHE}))
    TRAINER = Held(trained=frozenset(ALL_STATES), critic=frozenset(ALL_STATES), frozen=frozenset({"parameters"}))
    UPDATE = Held(trained=frozenset({"parameters"}), engines=frozenset({WEIGHTS}))


class SharedDevices:
    """Moves states on and off the devices when the phase changes.

    After a call that failed, some ranks may have done it and others not. So this class tracks which states are
    certainly on the devices and which are possibly on them. It offloads what is possibly there and not needed, and
    loads what is needed and not certainly there; ranks and engines ignore a call that changes nothing.
    """

    def __init__(
        self,
        train: Cluster[TrainWorker],
        frozen: list[Cluster[TrainWorker]],
        infer: Cluster[InferWorker],
        in_flight_policy: InFlightPolicy,
        critic: Cluster[TrainWorker] | None = None,
    ) -> None:
        """Starts with trainers that hold everything, and engines that do not run yet.

        Roles in `frozen` are not trained; `critic` is given if it is on the same devices.
        """
        # A request that is paused in place keeps its part of the cache, which is to be freed.
        self._mode: InFlightPolicy = "abort_resume" if in_flight_policy == "in_place" else in_flight_policy
        self._infer = infer
        self._clusters = {"trained": [train], "critic": [] if critic is None else [critic], "frozen": frozen}
        self._certain = self._possible = Phase.TRAINER.value

    async def engines_may_start(self) -> None:
        """Offloads all states; the engines, which start afterwards, load theirs."""
        await self._offload(Held())
        self._certain = self._possible = Phase.ENGINES.value

    async def to_trainer(self, finish_requests: bool = True) -> None:
        """The trainer computes next; the engines are paused until a weight update resumes them.

        Without `finish_requests` running requests are interrupted, whatever the policy: the run ends, or resumes.
        """
        await self._to(Phase.TRAINER, self._mode if finish_requests else "abort_resume")

    async def to_update(self) -> None:
        """Weights are sent next; the engines are paused."""
        await self._to(Phase.UPDATE, self._mode)

    async def to_engines(self) -> None:
        """The engines generate next, once they are resumed."""
        await self._to(Phase.ENGINES, self._mode)

    async def _to(self, phase: Phase, mode: InFlightPolicy) -> None:
        target = phase.value
        if self._certain == self._possible == target:
            return
        if CACHE in self._possible.engines - target.engines:
            await self._infer.call(ALL, InferWorker.pause, mode)
        await self._offload(target)
        await self._load(target)

    async def _offload(self, target: Held) -> None:
        held, self._certain = self._possible, self._certain & target
        await self._move(held, target, TrainWorker.offload_states, InferWorker.release_memory)
        self._possible = held & target

    async def _load(self, target: Held) -> None:
        held, self._possible = self._certain, target
        await self._move(target, held, TrainWorker.load_states, InferWorker.resume_memory)
        self._certain = target

    async def _move(self, these: Held, without: Held, of_trainers: Callable[..., Any], of_engines: Any) -> None:
        """Calls the methods for the states of `these` that are not in `without`; raises the first failure after all."""
        calls: list[Awaitable[object]] = []
        for name, clusters in self._clusters.items():
            if moved := getattr(these, name) - getattr(without, name):
                calls += [cluster.call(ALL, of_trainers, sorted(moved)) for cluster in clusters]
        if moved := these.engines - without.engines:
            calls.append(self._infer.call(ALL, of_engines, sorted(moved)))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
