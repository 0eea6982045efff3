"""Prompts with the answer their reward compares with, from rows in this project's layout or in verl's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roll.configs.roles import DataArguments
from roll.datasets.records import DatasetError, Record, read_records

DEFAULT_TAG = "default"
"""Tag of a prompt whose file has none; a reward without `tag_included` scores it."""

CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Who may speak in chat messages."""

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """What is asked: a text, or chat messages; exactly one of the two."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Prompt:
    """A question for the policy.

    Attributes:
        id: unique over the data set.
        tag: says which reward scores the responses.
        question: what is asked.
        ground_truth: what the reward compares a response with.
    """

    id: str
    tag: str
    question: Question
    ground_truth: str


def load_prompts(files: str | list[str], data_args: DataArguments) -> list[Prompt]:
    """Prompts of all files, in order.

    The columns are those that `data_args` names. verl's layout is read too: `prompt` as a list of messages,
    `reward_model.ground_truth`, `data_source` as the tag, and `uid` or `index` (also inside `extra_info`) as the id,
    the index with the data source before it. A prompt without an id gets its file and line.

    Raises:
        DatasetError: a file is missing, empty or has a bad line; a column is missing (with those there are) or holds
            nothing that could be asked or compared with; an id stands twice.
    """
    records = read_records(files)
    prompts = [
        Prompt(
            id=record_id(record, data_args),
            tag=_tag(record, data_args),
            question=question(record, data_args),
            ground_truth=_ground_truth(record, data_args),
        )
        for record in records
    ]
    require_unique([prompt.id for prompt in prompts], records)
    return prompts


def require_unique(ids: list[str], records: list[Record]) -> None:
    """Raises a DatasetError naming the ids that stand more than once, and where."""
    places: dict[str, list[str]] = {}
    for key, record in zip(ids, records, strict=True):
        places.setdefault(key, []).append(record.place)
    twice = [f"{key} ({found[0]} and {found[1]})" for key, found in places.items() if len(found) > 1]
    if twice:
        more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
        raise DatasetError(f"ids that stand more than once: {', '.join(twice[:5])}{more}; ids must be unique")


def question(record: Record, data_args: DataArguments) -> Question:
    """The row's question: its messages where it has them, else its text.

    Raises:
        DatasetError: neither column is there, or what it holds is neither text nor messages.
    """
    for column in (data_args.messages, data_args.prompt):
        value = record.row.get(column)
        if isinstance(value, str) and value.strip():
            return Question(text=value)
        if isinstance(value, list) and value:
            return Question(messages=tuple(_message(record, column, item) for item in value))
        if value is not None:
            record.fail(f"column {column!r} holds {value!r}; it takes a text or a list of messages, not empty")
    record.fail_missing(data_args.prompt, data_args.messages)


def record_id(record: Record, data_args: DataArguments) -> str:
    """The row's identity, from its columns, else from its file and line."""
    row = record.row
    for value in (row.get(data_args.id), row.get("uid")):
        if value is not None:
            return str(value)
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        record.fail(f"column 'extra_info' holds a {type(extra).__name__}; it takes an object, such as {{'index': 7}}")
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
            record.fail(f"column {column!r} holds {value!r}; no response could be compared with that")
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            record.fail(f"column {column!r} holds a {type(value).__name__}; the ground truth is a text or a number")
    record.fail_missing(*candidates)


def _message(record: Record, column: str, item: Any) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or not isinstance(item.get("content"), str):
        record.fail(f"column {column!r} holds {item!r}; a message is an object with a role and a content, both text")
    if item["role"] not in CHAT_ROLES:
        record.fail(f"column {column!r} holds a message of {item['role']!r}; a role is one of {', '.join(CHAT_ROLES)}")
    return {"role": item["role"], "content": item["content"]}
