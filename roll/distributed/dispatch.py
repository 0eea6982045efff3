"""How one call of the driver reaches the ranks of a role, and whose answers it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import ray

from roll.configs.parallel_layout import ParallelLayout

Method = TypeVar("Method", bound=Callable[..., Any])
_MARK = "_roll_registered"


class Dispatch(Enum):
    """What each rank is given.

    ONE_TO_ALL: the same arguments. ALL_TO_ALL: every argument is a list with one entry per rank. DP: every positional
    argument is a list with one entry per data index, and every rank of that index gets it; keyword arguments are the
    same for all.
    """

    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP = "dp"


class Collect(Enum):
    """Whose answers come back: ALL, a list by rank; FIRST, that of rank 0; DP, a list by data index."""

    ALL = "all"
    FIRST = "first"
    DP = "dp"


@dataclass(frozen=True)
class Registration:
    """How a registered method is called."""

    dispatch: Dispatch
    collect: Collect
    deadline: str


def register(
    dispatch: Dispatch = Dispatch.ONE_TO_ALL, collect: Collect | None = None, deadline: str = "rpc_timeout_s"
) -> Callable[[Method], Method]:
    """Makes a worker's method callable on its cluster.

    Args:
        dispatch: what each rank is given.
        collect: whose answers come back; by default DP for DP dispatch and ALL for the others.
        deadline: key of the pipeline's configuration that bounds the call; `Pending.within` overrides it.
    """
    chosen = collect or (Collect.DP if dispatch is Dispatch.DP else Collect.ALL)

    def mark(method: Method) -> Method:
        setattr(method, _MARK, Registration(dispatch, chosen, deadline))
        return method

    return mark


def registrations(worker_cls: type) -> dict[str, Registration]:
    """Registered methods of a worker class by name."""
    found = {name: getattr(getattr(worker_cls, name), _MARK, None) for name in dir(worker_cls)}
    return {name: value for name, value in found.items() if value is not None}


def arguments_by_rank(
    dispatch: Dispatch, layout: ParallelLayout, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of each rank; under DP a shard is put in the object store once and its ranks refer to it.

    Raises:
        ValueError: a list has another length than there are receivers.
    """
    ranks = range(layout.world_size)
    if dispatch is Dispatch.ONE_TO_ALL:
        return [(args, kwargs) for _ in ranks]
    if dispatch is Dispatch.ALL_TO_ALL:
        _check_lengths(name, (*args, *kwargs.values()), layout.world_size, "ranks")
        return [(tuple(a[r] for a in args), {key: value[r] for key, value in kwargs.items()}) for r in ranks]
    _check_lengths(name, args, layout.data, "data-parallel shards")
    shards = [tuple(ray.put(argument[index]) for argument in args) for index in range(layout.data)]
    return [(shards[layout.coordinates(rank).data], kwargs) for rank in ranks]


def answering_ranks(collect: Collect, layout: ParallelLayout) -> list[int]:
    """Ranks whose answers are returned; DP takes tensor 0 of the last pipeline stage, in the order of data indices."""
    if collect is Collect.FIRST:
        return [0]
    if collect is Collect.DP:
        return [layout.rank(0, index, layout.pipeline - 1) for index in range(layout.data)]
    return list(range(layout.world_size))


def collect_answers(collect: Collect, wanted: list[int], answers: list[Any]) -> Any:
    """What the caller gets of the answers by rank."""
    return answers[0] if collect is Collect.FIRST else [answers[rank] for rank in wanted]


def _check_lengths(name: str, lists: tuple[Any, ...], length: int, receivers: str) -> None:
    for position, value in enumerate(lists):
        if not isinstance(value, list) or len(value) != length:
            got = f"{len(value)} entries" if isinstance(value, list) else type(value).__name__
            wanted = f"a list with one entry for each of {length} {receivers}"
            raise ValueError(f"{name}: argument {position} must be {wanted}, got {got}")
