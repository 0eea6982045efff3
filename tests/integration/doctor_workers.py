"""A worker of `roll doctor` whose device is slow; an own module, so that workers can import it."""

from __future__ import annotations

import time

from roll.tools.doctor.measure import SpeedWorker


class MatmulSlowOnNodeOne(SpeedWorker):
    """Matrix products take more than ten times as long on node 1, which no other work on the machine makes up for."""

    def multiply(self) -> None:
        start = time.monotonic()
        super().multiply()
        if self.rank.node == 1:
            time.sleep(0.1 + 10 * (time.monotonic() - start))
