"""What every learner with one trained role shares: saving, restoring and exporting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roll.distributed.train_worker import TrainWorker

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster

ROLE = "actor_train"


class ActorLearner:
    """Saves and restores actor_train."""

    def __init__(self, actor: Cluster[TrainWorker]) -> None:
        """Takes the cluster that learns."""
        self._actor = actor

    async def memory(self) -> dict[str, float]:
        """`memory/actor_train_<kind>`: the largest of any rank, in bytes."""
        ranks = await self._actor.call_all(TrainWorker.memory)
        return {f"memory/{ROLE}_{kind}": float(max(rank[kind] for rank in ranks)) for kind in ranks[0]}

    async def save(self, folder: Path) -> None:
        """Writes weights, optimizer, schedule and RNG."""
        await self._actor.call_all(TrainWorker.save_checkpoint, str(folder / ROLE))

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        await self._actor.call_all(TrainWorker.load_checkpoint, str(folder / ROLE))

    async def export_hf(self, folder: Path) -> None:
        """Writes the trained model as a HF folder."""
        await self._actor.call_all(TrainWorker.export_hf, str(folder))
