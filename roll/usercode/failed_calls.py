"""Calls of a reward that are skipped: of a group with a failed response, or equal to one that hung before."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from roll.rewards.calling import RewardOutcome
from roll.usercode.reward_process import Call

HUNG_CALLS = 1024
"""Calls that hung and are remembered; of more, the oldest are forgotten."""

HUNG_S = 600.0
"""Seconds for which a call that hung is remembered: a cause outside the response, such as a slow disk, may end."""


class FailedGroups:
    """Groups with a response that cannot be scored; their other calls need not be made: a group is dropped whole."""

    def __init__(self, groups: Mapping[int, int]) -> None:
        """`groups` has the number of the group of each call by the `id` of the call."""
        self._groups = groups
        self._failures: dict[int, RewardOutcome] = {}

    def add(self, call: Call, failure: RewardOutcome) -> None:
        self._failures[self._groups[id(call)]] = failure

    def failure(self, call: Call) -> RewardOutcome | None:
        """The failure of a call of the same group; None where there is none."""
        return self._failures.get(self._groups[id(call)])


class HungCalls:
    """Calls that passed their deadline while they were alone in their process, the last HUNG_CALLS in HUNG_S seconds.

    An equal call would hang again. Calls are equal if all that the function reads by its parameters is equal: the
    responses, the ground truth and, where it asks for them, the prompt, the row, the tag and the id. A call of a chunk
    that hung is made alone before it is remembered; one that raised, or whose process died, is never remembered.
    """

    def __init__(self, reads: frozenset[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Remembers calls of a function that reads these attributes of a request."""
        self._reads, self._clock = sorted(reads), clock
        self._hung: OrderedDict[bytes, tuple[float, RewardOutcome]] = OrderedDict()

    def add(self, call: Call, failure: RewardOutcome) -> None:
        """Records a call that hung while it was alone in its process."""
        key = self._key(call)
        self._hung[key] = self._clock(), failure
        self._hung.move_to_end(key)
        if len(self._hung) > HUNG_CALLS:
            self._hung.popitem(last=False)

    def failure(self, call: Call) -> RewardOutcome | None:
        """The failure of an equal call; None where none hung."""
        if not self._hung:
            return None
        hung_at, failure = self._hung.get(self._key(call), (-HUNG_S, None))
        return failure if self._clock() - hung_at < HUNG_S else None

    def _key(self, call: Call) -> bytes:
        request, index = call
        texts = repr((request.responses, index, request.ground_truth))
        others: list[Any] = [getattr(request, name) for name in self._reads]
        return hashlib.blake2b(texts.encode(errors="surrogatepass") + pickle.dumps(others)).digest()
