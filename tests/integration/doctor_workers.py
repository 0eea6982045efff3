"""A worker of `roll doctor` whose device is slow; an own module, so that workers can import it."""

from __future__ import annotations

import time

from roll.tools.doctor.measure import SpeedWorker


class MatmulSlowOnNodeOne(SpeedWorker):
    """Matrix products take fifteen times as long on node 1."""

    def multiply(self) -> None:
        start = time.perf_counter()
        super().multiply()
        if self.rank.node == 1:
            time.sleep(14 * (time.perf_counter() - start))
