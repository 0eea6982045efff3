"""Prompts with their ground truth, in this project's layout or verl's, and the order in which they are sampled."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from roll.configs.arguments import DataArguments
from roll.datasets.records import Record, read_records

DEFAULT_TAG = "default"
"""Tag of a prompt whose data has none; a reward without `tag_included` scores it."""

CHAT_ROLES = ("system", "user", "assistant", "tool")
"""Roles allowed in chat messages."""

ANSWER_FIELDS = {"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"}
"""Parts of a message of the assistant beside its content."""

MESSAGES_AS_TEXT = re.compile(r"\s*\[\s*\{")
"""Beginning of a text that may contain messages as JSON."""

Message = dict[str, Any]
"""A chat message: `role`, `content` (a text, or None beside tool calls), and other fields as the data has them."""


@dataclass(frozen=True)
class Question:
    """Content of a prompt: exactly one of a text and chat messages.

    Attributes:
        text: without roles.
        messages: a last one of the assistant is continued by the response.
        tools: schemas of the tools that the template shows to the model.
        source: file and line, for errors.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy.

    Attributes:
        id: unique in the dataset.
        tag: selects the reward that scores the responses.
        question: content of the prompt.
        ground_truth: what the reward compares a response with: a text, a number as text, or any other JSON value; None
            where the row has none.
        row: of the data file, by column.
    """

    id: str
    tag: str
    question: Question
    ground_truth: Any
    row: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


TruthsRead = Callable[[str], Mapping[str, tuple[type, ...]]]
"""The rewards that compare with the ground truth of prompts with a tag, and the types that it may have."""


def text_truth(tag: str) -> Mapping[str, tuple[type, ...]]:
    return {"the reward": (str, int, float)}


def load_prompts(
    files: str | list[str], data_args: DataArguments, truths_read: TruthsRead = text_truth
) -> list[Prompt]:
    """Reads prompts from all files, in order.

    The column names are those in `data_args`. verl's layout is read too: `prompt` as a list of messages,
    `reward_model.ground_truth`, `data_source` as the tag, and as the id `uid` or `index`, at top level or inside
    `extra_info`; an index is prefixed with the data source. A prompt without an id gets its file and line as id. Rows
    with the same id are prompts of their own: the second gets the id with `#2` after it, and so on.

    Raises:
        DatasetError: a file is missing, empty or has an invalid line; a column is missing (the message lists the
            existing ones) or has an invalid value.
    """
    return with_unique_ids([read_prompt(record, data_args, truths_read) for record in read_records(files)])


def read_prompt(record: Record, data_args: DataArguments, truths_read: TruthsRead = text_truth) -> Prompt:
    """The prompt of one row; see `load_prompts`."""
    tag = tag_of(record, data_args)
    return Prompt(
        id=record_id(record, data_args),
        tag=tag,
        question=question(record, data_args),
        ground_truth=_ground_truth(record, data_args, truths_read(tag)),
        row=record.row,
    )


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


ItemT = TypeVar("ItemT", bound=_HasId)


def with_unique_ids(items: Sequence[ItemT]) -> list[ItemT]:
    """The items in order; the second with an id gets `#2` after it, and so on."""
    taken, counts = {item.id for item in items}, Counter[str]()
    unique: list[ItemT] = []
    for item in items:
        counts[item.id] += 1
        key = item.id
        while counts[item.id] > 1 and key in taken:
            key = f"{item.id}#{counts[item.id]}"
            counts[item.id] += key in taken
        taken.add(key)
        unique.append(item if key == item.id else replace(item, id=key))  # type: ignore[type-var]
    return unique


def repeated_ids(ids: Sequence[str], records: Sequence[Record]) -> str:
    """How many rows have the id of an earlier row, with an example; empty if none has."""
    first: dict[str, Record] = {}
    again = [(key, record) for key, record in zip(ids, records, strict=True) if first.setdefault(key, record) != record]
    if not again:
        return ""
    key, record = again[0]
    return (
        f"{len(again):,} of {len(ids):,} rows have the id of an earlier row, such as {key} ({first[key].location} and "
        f"{record.location}): each is a prompt of its own, whose id ends in #2, #3, ..."
    )


def question(record: Record, data_args: DataArguments, given: tuple[Message, ...] = ()) -> Question:
    """Content of the row's prompt: messages as a list or as JSON in a text, else its text; or the `given` messages.

    Raises:
        DatasetError: neither column exists, or its value is neither a text nor messages.
    """
    if given:
        return Question(None, given, _tools(record, data_args), record.location)
    for column in (data_args.messages, data_args.prompt):
        value = _messages_in(record.row.get(column))
        if isinstance(value, str) and value.strip():
            asked = _text_question(value, record, data_args)
            return replace(asked, tools=_tools(record, data_args), source=record.location)
        if isinstance(value, list) and value:
            return question(record, data_args, tuple(_message(record, column, item) for item in value))
        if value is not None:
            record.fail(f"column {column!r} holds {value!r}; use a text or a list of messages, not empty")
    record.fail_missing(data_args.prompt, data_args.messages, key="prompt")


def _messages_in(value: Any) -> Any:
    """The messages of a text that contains them as JSON, as in data of ROLL; any other value unchanged."""
    if not isinstance(value, str) or not MESSAGES_AS_TEXT.match(value):
        return value
    try:
        messages = json.loads(value)
    except (ValueError, RecursionError):
        return value
    parts = {"content", *ANSWER_FIELDS}
    is_chat = all(isinstance(message, dict) and "role" in message and parts & message.keys() for message in messages)
    return messages if is_chat else value


def _text_question(text: str, record: Record, data_args: DataArguments) -> Question:
    """A text, with the text of the column `query` on a new line, after the message of the column `system`."""
    query, system = _optional_text(record, data_args.query), _optional_text(record, data_args.system)
    text = f"{text}\n{query}" if query else text
    if not system:
        return Question(text=text)
    return Question(messages=({"role": "system", "content": system}, {"role": "user", "content": text}))


def _optional_text(record: Record, column: str | None) -> str:
    value = record.row.get(column) if column else None
    if value is not None and not isinstance(value, str):
        record.fail(f"column {column!r} holds {value!r}; use a text")
    return (value or "").strip()


def record_id(record: Record, data_args: DataArguments) -> str:
    """Id of the row, from its columns or else from its file and line; see `load_prompts`."""
    row = record.row
    for column in (data_args.id, "uid"):
        if row.get(column) is not None:
            return _name_in(record, column, row[column])
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        record.fail(f"column 'extra_info' holds a {type(extra).__name__}; expected an object, such as {{'index': 7}}")
    if extra.get("uid") is not None:
        return _name_in(record, "extra_info.uid", extra["uid"])
    for column, value in (("index", row.get("index")), ("extra_info.index", extra.get("index"))):
        if value is not None:
            return f"{row.get('data_source') or record.file.stem}/{_name_in(record, column, value)}"
    return f"{record.file.stem}:{record.line}"


def tag_of(record: Record, data_args: DataArguments) -> str:
    """Tag of the row, or its data source, which selects the reward."""
    for column in (data_args.tag, "data_source"):
        if record.row.get(column):
            return _name_in(record, column, record.row[column])
    return DEFAULT_TAG


def _name_in(record: Record, column: str, value: Any) -> str:
    if isinstance(value, list | dict):
        record.fail(f"column {column!r} holds a {type(value).__name__}; an id or a tag is a text or a number")
    return str(value)


def _ground_truth(record: Record, data_args: DataArguments, readers: Mapping[str, tuple[type, ...]]) -> Any:
    nested = record.row.get("reward_model")
    candidates = {
        data_args.ground_truth: record.row.get(data_args.ground_truth),
        "reward_model.ground_truth": nested.get("ground_truth") if isinstance(nested, dict) else None,
        data_args.response: record.row.get(data_args.response),
    }
    for column, value in candidates.items():
        if value is None:
            continue
        blank = isinstance(value, str) and not value.strip() or isinstance(value, float) and not math.isfinite(value)
        for reward, types in readers.items():
            if blank:
                record.fail(f"column {column!r} holds {value!r}; {reward} cannot compare a response with it")
            if isinstance(value, bool) or not isinstance(value, types):
                wanted = "a text, a number or a list" if list in types else "a text or a number"
                record.fail(f"column {column!r} holds a {type(value).__name__}; {reward} compares with {wanted}")
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            record.fail(f"column {column!r} holds a ground truth that is not JSON: {error}")
        return value
    if readers:
        record.fail_missing(*candidates, key="ground_truth")
    return None


def answer(record: Record, column: str, key: str) -> tuple[tuple[Message, ...], str | Message]:
    """The response in a column: a text, or messages that end with the assistant's; and the messages before it.

    A response is a message where it has more than a text, such as tool calls. `key` names the column in `data_args`.

    Raises:
        DatasetError: the column is missing or empty, or holds something else.
    """
    value: Any = _messages_in(record.row.get(column))
    if value is None:
        record.fail_missing(column, key=key)
    if isinstance(value, str) and value.strip():
        return (), value
    if not isinstance(value, list) or not value:
        record.fail(
            f"column {column!r} holds {value!r}; use a text, not empty, or messages that end with the assistant's"
        )
    *before, last = (_message(record, column, item) for item in value)
    return tuple(before), answer_in(record, column, last)


def answer_in(record: Record, column: str, message: Message) -> str | Message:
    """The response that a message of the assistant is: its text where it has no other part; see `answer`."""
    if message["role"] != "assistant" or not (message["content"] or "").strip() and not message.keys() & ANSWER_FIELDS:
        record.fail(f"column {column!r} ends with {message!r}; a response is a message of the assistant, not empty")
    return message if message.keys() & ANSWER_FIELDS else str(message["content"])


def _message(record: Record, column: str, item: Any) -> Message:
    """The message without fields that are null; parts of text become one text, and JSON in tool calls is parsed."""
    message = _without_nulls(record, item)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        record.fail(f"column {column!r} holds {item!r}; a message has a role and a content, both text")
    if message["role"] not in CHAT_ROLES:
        record.fail(f"column {column!r} holds the role {message['role']!r}; roles are {', '.join(CHAT_ROLES)}")
    message = {name: value for name, value in message.items() if value is not None and value != []}
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call) for call in _objects(record, column, message["tool_calls"])]
    content = message.get("content")
    if isinstance(content, list):
        kinds = [part.get("type", "text") if isinstance(part, dict) else part for part in content]
        if any(kind != "text" for kind in kinds):
            record.fail(f"column {column!r} has a message with parts {kinds}; a message has parts of type text only")
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str) and (content is not None or not message.keys() & ANSWER_FIELDS):
        record.fail(f"column {column!r} holds {item!r}; a message has a role and a content, both text")
    return message | {"content": content}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, as templates expect; OpenAI's format has them as JSON in a text."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _tool_call(call["function"])}
    return call | {"arguments": _from_json(call["arguments"])} if "arguments" in call else call


def _tools(record: Record, data_args: DataArguments) -> tuple[dict[str, Any], ...]:
    value = _without_nulls(record, record.row.get(data_args.tools) or [])
    return tuple(_objects(record, data_args.tools, value))


def _objects(record: Record, column: str, value: Any) -> list[dict[str, Any]]:
    value = _from_json(value)
    items = [_from_json(item) for item in value] if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, dict):
            record.fail(
                f"column {column!r} holds {item!r}; tools and calls of tools are lists of objects, or such JSON"
            )
    return items


def _from_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _without_nulls(record: Record, value: Any) -> Any:
    """A value of a parquet file without the nulls for fields that only other rows have."""
    if record.file.suffix != ".parquet":
        return value
    if isinstance(value, dict):
        return {name: _without_nulls(record, item) for name, item in value.items() if item is not None}
    return [_without_nulls(record, item) for item in value] if isinstance(value, list) else value


def mixed_domain(drawn: Sequence[int], shares: Sequence[float]) -> int:
    """Index of the domain to draw from next: the one furthest behind its share of the draws, which were `drawn` so far.

    Any number of draws in a row has each domain's share of them, up to one draw.
    """
    count = sum(drawn) + 1
    return max(range(len(shares)), key=lambda index: (shares[index] * count - drawn[index], -index))


class MixedSampler:
    """A `PromptSampler` for each domain, drawn from in given shares; a domain that is finished starts again.

    Shares have any unit; domains without one are not drawn.

    Raises:
        ValueError: no domain has a share, or one that has a share has no prompts.
    """

    def __init__(
        self, domains: Mapping[str, Sequence[int]], shares: Mapping[str, float], seed: int, shuffle: bool = True
    ) -> None:
        self._names = [name for name, share in shares.items() if share > 0]
        empty = [name for name in self._names if not domains.get(name)]
        if empty or not self._names:
            raise ValueError(f"no prompts in {', '.join(empty)}" if empty else "no domain has a share")
        total = sum(shares[name] for name in self._names)
        self._shares = [shares[name] / total for name in self._names]
        self._indices = [list(domains[name]) for name in self._names]
        self._samplers = [PromptSampler(len(indices), seed, shuffle) for indices in self._indices]
        self._drawn = [0] * len(self._names)

    @property
    def epoch(self) -> int:
        return min(sampler.epoch for sampler in self._samplers)

    def take(self, count: int) -> list[int]:
        """The next `count` indices."""
        taken = []
        for _ in range(count):
            domain = mixed_domain(self._drawn, self._shares)
            self._drawn[domain] += 1
            taken.append(self._indices[domain][self._samplers[domain].take(1)[0]])
        return taken

    def state_dict(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self._samplers]
        return {"names": self._names, "shares": self._shares, "drawn": list(self._drawn), "domains": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of `state_dict`; shares may have changed, domains may not.

        Raises:
            ValueError: the state is from other domains, or as `PromptSampler`.
        """
        if state.get("names") != self._names:
            before = state.get("names", ["files without domain_interleave_probs"])
            raise ValueError(
                f"the checkpoint was written with the domains {', '.join(before)} and cannot be resumed with "
                f"{', '.join(self._names)}; use the same domains"
            )
        for sampler, own in zip(self._samplers, state["domains"], strict=True):
            sampler.load_state_dict(own)
        same = state["shares"] == self._shares
        self._drawn = list(state["drawn"]) if same else [0] * len(self._names)


class PromptSampler:
    """An endless, resumable sequence of the indices 0 .. size-1, epoch after epoch.

    Each epoch contains every index once, in an order that depends only on the seed and the number of the epoch; without
    `shuffle`, in the order of the data.

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
        if "size" not in state:
            raise ValueError("the checkpoint was written with domain_interleave_probs; use the same domains")
        changed = [key for key in ("size", "seed", "shuffle") if state[key] != current[key]]
        if changed:
            seeds = "seed is another one"  # not that of the run but one derived from it
            changes = ", ".join(
                seeds if key == "seed" else f"{key} was {state[key]} and is {current[key]}" for key in changed
            )
            raise ValueError(f"the prompt sampler cannot be resumed: {changes}; use the data and seed of the first run")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
