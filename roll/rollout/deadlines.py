"""Which running prompts a batch must wait for so that every deadline can still be met."""

from __future__ import annotations

from collections import Counter


class Deadlines:
    """Prompts that are not consumed yet, counted by deadline: all of them, and those that are ready.

    There are as many deadlines at a time as versions that generation may be ahead, plus one: cost and memory do not
    grow with the number of prompts.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._outstanding: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def submit(self, deadline: int, count: int = 1) -> None:
        """Prompts are in flight."""
        self._outstanding[deadline] += count

    def finish(self, deadline: int) -> None:
        """One became ready."""
        self._ready[deadline] += 1

    def drop_running(self, deadline: int) -> None:
        """One in flight went."""
        self._lower(self._outstanding, deadline)

    def remove_ready(self, deadline: int) -> None:
        """One that was ready went: consumed, or too old."""
        self._lower(self._outstanding, deadline)
        self._lower(self._ready, deadline)

    @staticmethod
    def _lower(counts: Counter[int], deadline: int) -> None:
        counts[deadline] -= 1
        if not counts[deadline]:
            del counts[deadline]

    def waits_for(self, version: int, batch_size: int) -> int | None:
        """The earliest deadline up to which too few prompts are ready for the batch that `version` learns from.

        With this batch and those of versions up to d, (d - version) of them besides this one, everything due by d must
        be consumed. So this batch must hold at least

            need(d) = outstanding(deadline <= d) - (d - version) * batch_size

        prompts due by d. A batch filled earliest deadline first holds min(batch_size, ready(deadline <= d)) of them,
        whatever d is, and it must wait exactly while that is less than need(d) for some d. For d = version this says:
        nothing due now is left behind. None: it need not wait.
        """
        outstanding = ready = 0
        for deadline in sorted(self._outstanding):
            outstanding += self._outstanding[deadline]
            ready += self._ready[deadline]
            if min(batch_size, ready) < outstanding - max(0, deadline - version) * batch_size:
                return deadline
        return None
