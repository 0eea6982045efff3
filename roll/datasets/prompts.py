"""Prompts with their ground truth, in this project's layout or verl's, and the order in which they are sampled."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.configs.roles import DataArguments
from roll.datasets.records import DatasetError, Record, read_records

DEFAULT_TAG = "default"
"""Tag of a prompt whose data has none; a reward without `tag_included` scores it."""

CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Roles allowed in chat messages."""

Message = dict[str, str]
"""A chat message: `role` and `content`."""


@dataclass(frozen=True)
class Question:
    """Content of a prompt: exactly one of a text and chat messages."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy.

    Attributes:
        id: unique in the dataset.
        tag: selects the reward that scores the responses.
        question: content of the prompt.
        ground_truth: what the reward compares a response with.
        row: of the data file, by column.
    """

    id: str
    tag: str
    question: Question
    ground_truth: str
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def load_prompts(files: str | list[str], data_args: DataArguments) -> list[Prompt]:
    """Reads prompts from all files, in order.

    The column names are those in `data_args`. verl's layout is read too: `prompt` as a list of messages,
    `reward_model.ground_truth`, `data_source` as the tag, and as the id `uid` or `index`, at top level or inside
    `extra_info`; an index is prefixed with the data source. A prompt without an id gets its file and line as id.

    Raises:
        DatasetError: a file is missing, empty or has an invalid line; a column is missing (the message lists the
            existing ones) or has an invalid value; an id occurs twice.
    """
    records = read_records(files)
    prompts = [read_prompt(record, data_args) for record in records]
    check_unique_ids([prompt.id for prompt in prompts], records)
    return prompts


def read_prompt(record: Record, data_args: DataArguments) -> Prompt:
    """The prompt of one row; see `load_prompts`."""
    return Prompt(
        id=record_id(record, data_args),
        tag=_tag(record, data_args),
        question=question(record, data_args),
        ground_truth=_ground_truth(record, data_args),
        row=record.row,
    )


def check_unique_ids(ids: list[str], records: list[Record]) -> None:
    """Raises a DatasetError that lists ids which occur more than once, with their locations."""
    locations: dict[str, list[str]] = {}
    for key, record in zip(ids, records, strict=True):
        locations.setdefault(key, []).append(record.location)
    twice = [f"{key} ({found[0]} and {found[1]})" for key, found in locations.items() if len(found) > 1]
    if twice:
        more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
        raise DatasetError(f"ids that occur more than once: {', '.join(twice[:5])}{more}; ids must be unique")


def question(record: Record, data_args: DataArguments) -> Question:
    """Content of the row's prompt: its messages if it has any, else its text.

    Raises:
        DatasetError: neither column exists, or its value is neither a text nor messages.
    """
    for column in (data_args.messages, data_args.prompt):
        value = record.row.get(column)
        if isinstance(value, str) and value.strip():
            return Question(text=value)
        if isinstance(value, list) and value:
            return Question(messages=tuple(_message(record, column, item) for item in value))
        if value is not None:
            record.fail(f"column {column!r} holds {value!r}; use a text or a list of messages, not empty")
    record.fail_missing(data_args.prompt, data_args.messages)


def record_id(record: Record, data_args: DataArguments) -> str:
    """Id of the row, from its columns or else from its file and line; see `load_prompts`."""
    row = record.row
    for value in (row.get(data_args.id), row.get("uid")):
        if value is not None:
            return str(value)
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        record.fail(f"column 'extra_info' holds a {type(extra).__name__}; expected an object, such as {{'index': 7}}")
    if extra.get("uid") is not None:
        return str(extra["uid"])
    for value in (row.get("index"), extra.get("index")):
        if value is not None:
            return f"{row.get('data_source') or record.file.stem}/{value}"
    return f"{record.file.stem}:{record.line}"


def _tag(record: Record, data_args: DataArguments) -> str:
    return str(record.row.get(data_args.tag) or record.row.get("data_source") or DEFAULT_TAG)


def _ground_truth(record: Record, data_args: DataArguments) -> str:
    nested = record.row.get("reward_model")
    candidates = {
        data_args.ground_truth: record.row.get(data_args.ground_truth),
        "reward_model.ground_truth": nested.get("ground_truth") if isinstance(nested, dict) else None,
        data_args.response: record.row.get(data_args.response),
    }
    for column, value in candidates.items():
        if isinstance(value, str) and not value.strip() or isinstance(value, float) and not math.isfinite(value):
            record.fail(f"column {column!r} holds {value!r}; a response cannot be compared with it")
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            record.fail(f"column {column!r} holds a {type(value).__name__}; a ground truth is a text or a number")
    record.fail_missing(*candidates)


def _message(record: Record, column: str, item: Any) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or not isinstance(item.get("content"), str):
        record.fail(f"column {column!r} holds {item!r}; a message has a role and a content, both text")
    if item["role"] not in CHAT_ROLES:
        record.fail(f"column {column!r} holds the role {item['role']!r}; roles are {', '.join(CHAT_ROLES)}")
    return {"role": item["role"], "content": item["content"]}


class PromptSampler:
    """An endless, resumable sequence of the indices 0 .. size-1, epoch after epoch.

    Each epoch contains every index once, in an order that depends only on the seed and the number of the epoch.

    Args:
        size: number of prompts.
        seed: determines the orders.
        shuffle: if false, every epoch is in the order of the data.

    Raises:
        ValueError: `size` is below 1.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError("a sampler needs at least one prompt")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next `count` indices; they may cross the end of an epoch."""
        indices: list[int] = []
        while len(indices) < count:
            part = self._order[self._position : self._position + count - len(indices)]
            indices += part
            self._position += len(part)
            if self._position == self._size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return indices

    def state_dict(self) -> dict[str, Any]:
        """The position, as values that JSON can hold."""
        return {
            "size": self._size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of `state_dict`.

        Raises:
            ValueError: the state is from another number of prompts, seed or shuffling, so its order differs.
        """
        current = self.state_dict()
        changed = [key for key in ("size", "seed", "shuffle") if state[key] != current[key]]
        if changed:
            changes = ", ".join(f"{key} was {state[key]} and is {current[key]}" for key in changed)
            raise ValueError(f"the prompt sampler cannot be resumed: {changes}; use the data and seed of the first run")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
