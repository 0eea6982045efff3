"""Weight updates by deltas: engines that have the last version get what has changed since."""

from __future__ import annotations

import asyncio
import time

from roll.distributed.calls.remote_call import ALL
from roll.distributed.infer.infer_worker import InferWorker
from roll.distributed.train.train_worker import TrainWorker
from roll.distributed.weights.delta_sender import StageDelta
from roll.distributed.weights.plan import Bucket
from roll.distributed.weights.report import Transfer
from roll.distributed.weights.synchronizer import WeightSynchronizer


class DeltaSynchronizer(WeightSynchronizer):
    """Sends deltas where all engines of an update have the version before, else whole weights.

    Engines have no known version after their start and after an attempt that failed. Whole weights go by the transport
    of the run, deltas through Ray's object store from the training ranks to the nodes of the engines. Every update is
    verified: a wrong or missing value cannot be committed, nor be carried to later versions.
    """

    _is_packing = False
    """Whether training ranks may be within a delta, which the next transfer ends first."""

    @property
    def verifies_all(self) -> bool:
        """Checksums of all parameters are compared in every update."""
        return True

    async def _transfer(self, verify: bool) -> Transfer:
        train = self._train
        if self._is_packing:
            await train.call(ALL, TrainWorker.release_delta)
        self._is_packing = not self._transport.whole
        if self._is_packing:
            sent = await self._send_deltas()
            await train.call(ALL, TrainWorker.release_delta)
            self._is_packing = False
            return sent
        sent = await super()._transfer(verify)
        await train.call(ALL, TrainWorker.keep_weights)
        return sent

    async def _send_deltas(self) -> Transfer:
        """Engines load one bucket while training ranks pack the next."""
        start = time.perf_counter()
        buckets, checksums, sent = self._transport.buckets(), dict[str, str](), 0
        packed = await self._pack(buckets, 0)
        for index in range(1, 1 + max(map(len, buckets))):
            for each in packed:
                checksums |= each.checksums
                sent += each.num_bytes
            packed, _ = await asyncio.gather(self._pack(buckets, index), self.load(packed))
        return Transfer(sent, checksums, time.perf_counter() - start)

    async def _pack(self, buckets: list[list[Bucket]], index: int) -> list[StageDelta]:
        if index == max(map(len, buckets)):
            return []
        ranks = self._transport.checksum_ranks(True)
        packed = await self._train.call(ALL, TrainWorker.pack_delta, buckets, index, ranks)
        return [each for each in packed if each is not None]

    async def load(self, packed: list[StageDelta]) -> None:
        """Writes the deltas of one bucket of each stage into the engines."""
        deltas = [each.deltas for each in packed if each.num_bytes]
        if deltas:
            await self._infer.call(self._transport.engines, InferWorker.receive_delta, *deltas)
