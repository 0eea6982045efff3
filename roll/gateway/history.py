"""The conversations of a session as a tree of messages, and how a request is found in it.

A node is a message. Answers of the policy are nodes with the exact ids that the engine saw and sampled; a request that
continues one is sent as these ids and the ids of its new messages. A request that continues none begins a branch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from roll.rollout.types import GenerateResult, Trajectory

Message = Mapping[str, Any]


def normal_form(message: Message) -> Hashable:
    """What equal messages have in common: role, text, and the names and arguments of tool calls.

    Ids of calls, the order of keys, spacing, null or absent values, and thoughts do not count.
    """
    calls = tuple((call["function"]["name"], _frozen(call["function"]["arguments"])) for call in _calls(message))
    return message["role"], str(message.get("content") or "").strip(), calls


def call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call.get("id")) for call in _calls(message))


def readable(messages: Sequence[Message], known: int) -> str:
    """The messages after the `known` ones as text, each with its role, and results of tools with the tool's name."""
    names = {call.get("id"): call["function"]["name"] for message in messages for call in _calls(message)}
    shown = []
    for message in messages[known:]:
        name = names.get(message.get("tool_call_id"))
        called = "".join(f"[calls {call['function']['name']}]" for call in _calls(message))
        who = f"{message['role']} {name}" if name else message["role"]
        shown.append(f"{who}: {message.get('content') or ''}{called}")
    return "\n".join(shown)


def _calls(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _frozen(value: Any) -> Hashable:
    """A JSON value as one that is equal where the JSON values are."""
    if isinstance(value, Mapping):
        return frozenset((key, _frozen(item)) for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return ("true or false", value) if isinstance(value, bool) else value


@dataclass(eq=False)
class MessageNode:
    """A message of the tree.

    Attributes:
        parent: the message before it; None for a root, which stands for the tools of a conversation.
        context: of an answer, the ids between the answer before it and its own.
        result: of an answer, what the engine sampled; None for other messages.
        text: of an answer, what the ids say; of others, their content.
        call_ids: of the tool calls of an answer.
        arrival: number of the answer in the session.
        read: of an answer, the messages since the answer before it, as text.
    """

    parent: MessageNode | None
    children: dict[Hashable, list[MessageNode]] = field(default_factory=dict)
    context: Sequence[int] = ()
    result: GenerateResult | None = None
    text: str = ""
    call_ids: tuple[str, ...] = ()
    arrival: int = 0
    read: str = ""

    def path(self) -> list[MessageNode]:
        """The messages from the root to this one."""
        found, node = [], self
        while node is not None:
            found.append(node)
            node = node.parent  # type: ignore[assignment]
        return found[::-1]

    def answers(self) -> list[MessageNode]:
        """The answers on the path to this message, with itself."""
        return [node for node in self.path() if node.result is not None]

    def ids(self) -> list[int]:
        """Exact ids up to the end of the last answer on the path."""
        parts = ((node.context, node.result.response_ids) for node in self.answers() if node.result is not None)
        return list(chain.from_iterable(chain.from_iterable(parts)))


@dataclass(frozen=True)
class Continuation:
    """Where a request stands in the tree.

    Attributes:
        answer: the answer that it continues; None where it continues none.
        known: number of its first messages that the answer ends.
        node: its last message, after which an answer is added.
    """

    answer: MessageNode | None
    known: int
    node: MessageNode


class History:
    """The tree of one session."""

    def __init__(self) -> None:
        self._roots: dict[str, MessageNode] = {}
        self.sampled: list[MessageNode] = []
        """All answers in the order of their arrival."""

    def place(self, messages: Sequence[Message], tools: Sequence[Any]) -> Continuation:
        """Finds the deepest answer that begins a request, and adds the messages after it to the tree.

        Of equal answers the one with the ids of the request's tool calls is taken, else the latest.
        """
        root = self._roots.setdefault(json.dumps(tools, sort_keys=True), MessageNode(None))
        paths = [root]
        best, known = root, 0
        for number, message in enumerate(messages):
            found = [child for node in paths for child in node.children.get(normal_form(message), ())]
            if not found:
                break
            ids = call_ids(message)
            paths = [child for child in found if ids and child.call_ids == ids] or found
            answers = [child for child in paths if child.result is not None]
            if answers:
                best, known = max(answers, key=lambda child: child.arrival), number + 1
        node = best
        for message in messages[known:]:
            node = self._add(node, message)
        return Continuation(best if best.result is not None else None, known, node)

    def add_answer(
        self,
        place: Continuation,
        context: Sequence[int],
        result: GenerateResult,
        text: str,
        message: Message,
        read: str,
    ) -> None:
        """Adds an answer of the policy after a request; `message` is what its client was answered."""
        node = MessageNode(
            place.node, {}, context, result, text, call_ids(message), arrival=len(self.sampled) + 1, read=read
        )
        place.node.children.setdefault(normal_form(message), []).append(node)
        self.sampled.append(node)

    def _add(self, parent: MessageNode, message: Message) -> MessageNode:
        same = [node for node in parent.children.get(normal_form(message), ()) if node.result is None]
        if same:
            return same[-1]
        node = MessageNode(parent, text=str(message.get("content") or ""))
        parent.children.setdefault(normal_form(message), []).append(node)
        return node

    def trajectory(self) -> Trajectory | None:
        """The last branch, with the others in `branches`; None if nothing was sampled.

        A branch ends with an answer that no other follows. An answer of several branches is trained on in the one that
        ends last, and is context in the others.
        """
        branches: list[Trajectory] = []
        trained: set[MessageNode] = set()
        for leaf in sorted(self._leaves(), key=lambda node: -node.arrival):
            branches.append(_branch(leaf.answers(), trained))
            trained.update(leaf.answers())
        if not branches:
            return None
        branches[0].branches = branches[:0:-1]
        return branches[0]

    def _leaves(self) -> Iterator[MessageNode]:
        followed = {before for node in self.sampled for before in node.answers()[:-1]}
        return (node for node in self.sampled if node not in followed)


def _branch(answers: Sequence[MessageNode], trained: set[MessageNode]) -> Trajectory:
    branch = Trajectory()
    for node in answers:
        assert node.result is not None
        branch.add_context(node.context)
        if node in trained:
            branch.add_context(node.result.response_ids)
        else:
            branch.add_response(branch.ids, node.result, node.read, node.text)
    return branch


def repeated_tokens(trajectory: Trajectory) -> int:
    """Tokens that rows of a session have in common with one another, so that they are computed again.

    In the order of their ids, each row shares most with the one before it.
    """
    rows = sorted(row.ids for row in trajectory.rows)
    return sum(_shared(before, row) for before, row in itertools.pairwise(rows))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
