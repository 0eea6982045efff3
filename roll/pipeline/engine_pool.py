"""All engines of actor_infer as one: requests are spread by group, failures are tried again, then reported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll.rollout.types import GenerateRequest, GenerateResult

if TYPE_CHECKING:
    from roll.distributed.cluster import Cluster


class EnginePool:
    """Sends groups of requests to engines; the members of a group share an engine, and so its prefix cache."""

    def __init__(self, cluster: Cluster, retries: int) -> None:
        """Takes the engines' cluster; a request is tried `retries` more times before it comes back aborted."""
        self._cluster = cluster
        self._retries = retries

    async def generate(self, groups: list[list[GenerateRequest]]) -> list[list[GenerateResult]]:
        """One result for each request, in the order asked; an aborted result carries its `error`."""
        flat = [request for group in groups for request in group]
        homes = assign_groups([len(group) for group in groups], self._cluster.world_size)
        engines = [homes[index] for index, group in enumerate(groups) for _ in group]
        results: list[GenerateResult | None] = [None] * len(flat)
        pending = list(range(len(flat)))
        for attempt in range(self._retries + 1):
            await self._try(flat, engines, pending, results, attempt)
            pending = [index for index in pending if _failed(results[index])]
            if not pending:
                break
            engines = [(engine + 1) % self._cluster.world_size for engine in engines]
        answers = iter(result for result in results if result is not None)
        return [[next(answers) for _ in group] for group in groups]

    async def _try(
        self,
        requests: list[GenerateRequest],
        engines: list[int],
        pending: list[int],
        results: list[GenerateResult | None],
        attempt: int,
    ) -> None:
        """Sends the pending requests once and files what comes back."""
        shares = [[index for index in pending if engines[index] == e] for e in range(self._cluster.world_size)]
        sent = [[_named(requests[index], attempt) for index in share] for share in shares]
        replies = await self._cluster.generate(sent)
        for share, answers in zip(shares, replies, strict=True):
            for index, answer in zip(share, answers, strict=True):
                results[index] = replace(answer, request_id=requests[index].request_id)


def assign_groups(sizes: list[int], engines: int) -> list[int]:
    """The engine of each group: always the one with the fewest requests so far, the lowest index among equals."""
    load = [0] * engines
    homes = []
    for size in sizes:
        home = load.index(min(load))
        load[home] += size
        homes.append(home)
    return homes


def _failed(result: GenerateResult | None) -> bool:
    return result is None or result.finish_reason == "abort"


def _named(request: GenerateRequest, attempt: int) -> GenerateRequest:
    """The same request under an id of its own, since an engine may still hold the failed one."""
    return request if attempt == 0 else replace(request, request_id=f"{request.request_id}#{attempt}")
