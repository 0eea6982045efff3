"""Weight updates by adapters: engines load those of each version while they generate."""

from __future__ import annotations

import time
from functools import partial

from roll.distributed.calls.remote_call import ALL
from roll.distributed.calls.remote_errors import deadline_scope
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.train.weight_sender import StageAdapters
from roll.distributed.weights.plan import PlanError
from roll.distributed.weights.report import Transfer
from roll.distributed.weights.synchronizer import WeightSynchronizer


class AdapterSynchronizer(WeightSynchronizer):
    """Sends adapters, without a pause, to engines that have the weights below them.

    Requests keep the adapter that they began with, and later ones get the new one. A failed attempt leaves an engine
    as it was: it serves the version before. Names and bytes of what arrives are always compared with what was sent.
    """

    _packed: tuple[int, list[StageAdapters]] | None = None
    """A version and its adapters, which restarted engines get too."""

    @property
    def verifies_all(self) -> bool:
        """Names and bytes of adapters are compared in every update."""
        return True

    async def _attempt(
        self, version: int, verify: bool, engines: list[int], alone: bool = False
    ) -> tuple[float, Transfer]:
        """Loads the adapters of `version` by `sync_timeout_s`."""
        self._transport.engines = engines
        deadline, start = time.monotonic() + self._config.sync_timeout_s, time.perf_counter()
        step = partial(self._step, deadline)
        with deadline_scope(deadline):
            if self._packed is None or self._packed[0] != version:
                stages = await step("gather", self._train.call(ALL, TrainWorker.pack_adapters))
                self._packed = version, checked_adapters([stage for of_rank in stages for stage in of_rank])
            sent = self._packed[1]
            loaded = await step("load", self.send(engines, version, sent))
        metrics = {"lora/adapters_loaded": float(max(loaded))}
        return 0.0, Transfer(sum(len(stage.data) for stage in sent), {}, time.perf_counter() - start, metrics)

    async def send(self, engines: list[int], version: int, stages: list[StageAdapters]) -> list[int]:
        """Loads adapters; how many versions each engine has then."""
        return await self._infer.call(engines, InferWorker.load_adapter, version, stages)


def checked_adapters(stages: list[StageAdapters]) -> list[StageAdapters]:
    """The stages in their order, of one policy after the other.

    Raises:
        PlanError: together they do not have every adapter of the model once, of each policy.
    """
    policies = dict.fromkeys(stage.policy for stage in stages)
    return [stage for policy in policies or [""] for stage in _whole([s for s in stages if s.policy == policy])]


def _whole(stages: list[StageAdapters]) -> list[StageAdapters]:
    found = sorted(name for stage in stages for name in stage.own)
    if found != sorted(stages[0].names if stages else ["an adapter"]):
        wrong = sorted(stages[0].names.symmetric_difference(found)) or found if stages else ["all"]
        raise PlanError(f"the stages do not send every adapter once; {wrong[0]} is missing, additional or sent twice")
    return sorted(stages, key=lambda stage: stage.stage)
