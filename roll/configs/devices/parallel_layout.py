"""The devices of a role: the `device_mapping` of the YAML, and how ranks are split into parallel dimensions."""

from __future__ import annotations

import ast
import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from roll.models.families.mixture import ExpertPlace

MAX_DEVICES = 1_000_000
"""Limit of device numbers: a typing error must not fill the memory with ranks."""

ALLOWED_FORMS = "a list of ranks, '0-7,16-23', or 'list(range(0,8))' and sums of these"


def parse_device_mapping(value: Any) -> list[int]:
    """Global device ranks in the order given, without duplicates.

    Raises:
        ValueError: the text is none of the allowed forms, a rank is negative, or a rank is given twice.
    """
    ranks = _ranks(value)
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"{value!r} contains a negative device")
    if ranks and max(ranks) >= MAX_DEVICES:
        raise ValueError(
            f"{reprlib.repr(value)} contains device {reprlib.repr(max(ranks))}; the last is {MAX_DEVICES - 1}"
        )
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if twice:
        raise ValueError(f"{value!r} contains device {twice[0]} twice")
    return ranks


def spans(ranks: Sequence[int]) -> str:
    """Ranks as `0-7,16-23`, in the order given."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def by_node(devices: Sequence[int], devices_per_node: int) -> list[tuple[int, ...]]:
    """The devices of one engine on each of its nodes, in the order given.

    Raises:
        ValueError: not the same number on each node, or a node comes twice.
    """
    parts = [tuple(part) for _, part in groupby(devices, lambda device: device // devices_per_node)]
    nodes = [part[0] // devices_per_node for part in parts]
    if len({len(part) for part in parts}) > 1 or len(set(nodes)) < len(nodes):
        placement = ", then ".join(f"{spans(part)} on node {node}" for part, node in zip(parts, nodes, strict=True))
        raise ValueError(
            f"devices {placement} ({devices_per_node} devices per node); an engine over several nodes needs the same "
            "number on each, one node after the other"
        )
    return parts


def _ranks(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    if isinstance(value, list | tuple):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return list(value)
        raise ValueError(f"{value!r} is not a list of whole numbers; use {ALLOWED_FORMS}")
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not {ALLOWED_FORMS}")
    text = value.strip()
    if re.fullmatch(r"\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*", text, re.ASCII):
        return [rank for part in text.split(",") for rank in _span(part)]
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except _TooMany:
        raise
    except (RecursionError, MemoryError):
        raise ValueError(f"{reprlib.repr(value)} has too many parts; write spans, such as '0-7,16-23'") from None
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{value!r} is not {ALLOWED_FORMS}") from error


def _span(part: str) -> list[int]:
    first, _, last = part.strip().partition("-")
    ranks = _listed(range(int(first), int(last or first) + 1))
    if not ranks:
        raise ValueError(f"the span {part.strip()!r} is empty; write the smaller rank first")
    return ranks


def _evaluate(node: ast.expr) -> list[int]:
    """Lists, `list(range(...))`, and their sums; anything else is refused."""
    if isinstance(node, ast.List):
        return [_whole(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluate(node.left) + _evaluate(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _evaluate(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            return _listed(range(*(_whole(item) for item in node.args)))
    raise ValueError(ast.dump(node))


class _TooMany(ValueError):
    """A span of more devices than MAX_DEVICES."""


def _listed(span: range) -> list[int]:
    if len(span) > MAX_DEVICES:
        raise _TooMany(f"{span.start} to {span.stop} are more than {MAX_DEVICES} devices")
    return list(span)


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(ast.dump(node))


@dataclass(frozen=True)
class RankCoordinates:
    """Index of one rank in each parallel dimension."""

    tensor: int
    data: int
    pipeline: int
    context: int = 0


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one role; in Megatron's order tensor, context, data, pipeline.

    The ranks of a stage that are tensor, context and data for all other weights are, for those of experts, tensor ranks
    of an expert, `expert`, and copies of these. An expert has `expert_tensor` of them, by default `tensor`.
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def world_size(self) -> int:
        return self.model_size * self.data

    @property
    def model_size(self) -> int:
        """Ranks that compute one copy of the model together."""
        return self.tensor * self.context * self.pipeline

    @property
    def chunks(self) -> int:
        """Equal chunks of a sample, each context rank computes two; 1 where samples are not split."""
        return 2 * self.context if self.context > 1 else 1

    def coordinates(self, rank: int) -> RankCoordinates:
        """Inverse of `rank`: rank = tensor + T * (context + C * (data + D * pipeline))."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        return RankCoordinates(tensor=tensor, context=context, data=rest % self.data, pipeline=rest // self.data)

    def rank(self, tensor: int, data: int, pipeline: int, context: int = 0) -> int:
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    @property
    def round_to(self) -> int:
        """Micro-batches are padded to multiples of this, so that every rank has equally many tokens."""
        return self.tensor * self.chunks

    def padded(self, length: int) -> int:
        """Tokens that a sample of `length` takes in a micro-batch: a multiple of `chunks`."""
        return -(-length // self.chunks) * self.chunks

    @property
    def expert_ranks(self) -> int:
        """Ranks that together have all experts of a stage."""
        return self.expert * (self.expert_tensor or self.tensor)

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage that have the same part of the same experts; 0 where the sizes do not divide."""
        ranks = self.tensor * self.context * self.data
        return 0 if ranks % self.expert_ranks else ranks // self.expert_ranks

    def expert_place(self, rank: int) -> ExpertPlace:
        """Which experts a rank has."""
        size = self.expert_tensor or self.tensor
        copy = rank // self.expert_ranks % max(1, self.expert_copies)
        return ExpertPlace(rank // size % self.expert, self.expert, rank % size, size, copy)

    def whole_dense(self, rank: int) -> range:
        """The ranks that together have every weight of the rank's stage but experts."""
        first = rank - rank % self.tensor
        return range(first, first + self.tensor)

    def whole_experts(self, rank: int) -> range:
        """The ranks that together have all experts of the rank's stage."""
        first = rank - rank % self.expert_ranks
        return range(first, first + self.expert_ranks)
