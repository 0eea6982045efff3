"""The training worker of the weight publishing tests: it moves its weights without learning."""

from __future__ import annotations

import torch

from roll.distributed.train_worker import TrainWorker
from roll.distributed.worker import register


class ScalingWorker(TrainWorker):
    """Stands on the real strategy; a factor on every weight is the quickest change that every layer feels."""

    @register()
    def scale_weights(self, factor: float) -> None:
        """Multiplies every parameter of this rank; tied embeddings stay equal on both stages."""
        with torch.no_grad():
            for parameter in self._strategy.stage.parameters():
                parameter.mul_(factor)
