"""How a reward function is called, by the names of its parameters, and which results it may return."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from roll.base.errors import RunError
from roll.base.text import nearest
from roll.configs.scoring.built_in_rewards import built_in_of, is_comparison
from roll.configs.scoring.rewards import LARGEST_REWARD, RewardConfig, is_trainable
from roll.configs.user_code import definition_of
from roll.datasets.prompts import Message, Question

Reason = Literal["raised", "timeout", "not_finite", "wrong_type", "too_long"]

SelfTest = tuple[tuple[str, Any, bool], ...]
"""(response, ground truth or row, whether the response is right) of known samples; SELF_TEST of a module."""

SCORE = "score"
"""Key of the reward in a dictionary that a reward function returns."""


@dataclass(frozen=True)
class RewardRequest:
    """The responses to one prompt, which are to be scored, and everything known about the prompt.

    Attributes:
        responses: the decoded responses.
        ground_truth: what the data has as the right answer, a text or another JSON value; None where it has none.
        question: the prompt, a text or messages.
        row: of the data file, by column.
        tag: of the prompt.
        id: of the prompt.
        prompt_text: the prompt as the model read it, in its chat template; empty where no model did.
        prompt_ids: token ids of that text.
        response_ids: token ids of each response.
    """

    responses: tuple[str, ...]
    ground_truth: Any
    question: Question = Question(text="")
    row: Mapping[str, Any] = field(default_factory=dict)
    tag: str = ""
    id: str = ""
    prompt_text: str = field(default="", compare=False)
    prompt_ids: tuple[int, ...] = field(default=(), compare=False, repr=False)
    response_ids: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def prompt(self) -> str:
        """The text of the prompt, or the last message of the user."""
        if self.question.messages is None:
            return self.question.text or ""
        asked = [message["content"] for message in self.question.messages if message["role"] == "user"]
        return str(asked[-1] if asked else self.question.messages[-1]["content"] or "")

    @property
    def messages(self) -> list[Message]:
        """The messages of the prompt; a text is one message of the user."""
        return [dict(message) for message in self.question.messages or ({"role": "user", "content": self.prompt},)]


@dataclass(frozen=True)
class RewardOutcome:
    """The score of a sample, or the reason why it has none; a failure is never a score of zero.

    Attributes:
        score: the reward, or None.
        reason: None if there is a score. `raised`: the function raised or its process died; `timeout`: it passed its
            deadline; `not_finite`: it returned NaN, infinity or a number beyond LARGEST_REWARD; `wrong_type`: it did
            not return one number, or a list of another length; `too_long`: prompt and response are longer than a reward
            model reads.
        detail: for the log; it begins with the user's file and line.
        metrics: other numbers that the function returned.
    """

    score: float | None
    reason: Reason | None = None
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


NO_OUTCOME = RewardOutcome(None, "wrong_type", "the process of the reward returned something else than outcomes")


def checked(outcome: Any) -> RewardOutcome:
    """An outcome from the process of a reward, whose code is the user's; a failure if it is none, or not finite."""
    if not isinstance(outcome, RewardOutcome) or not isinstance(outcome.metrics, Mapping):
        return NO_OUTCOME
    if outcome.score is None and outcome.reason is not None:
        return outcome
    numbers: list[Any] = [outcome.score, *outcome.metrics.values()]
    if len(numbers) > MOST_METRICS or not all(type(each) is float for each in numbers):
        return NO_OUTCOME
    if not all(map(is_trainable, numbers)):
        return RewardOutcome(None, "not_finite", f"the process of the reward returned {max(numbers, key=abs):g}")
    return outcome


@dataclass(frozen=True)
class _Call:
    """One call of a reward function: for the response at `index`, or for all responses."""

    request: RewardRequest
    index: int
    config: RewardConfig

    @property
    def response(self) -> str:
        return self.request.responses[self.index]

    def sample(self, index: int) -> SimpleNamespace:
        """A response with the attributes that reward functions of slime read."""
        request = self.request
        return SimpleNamespace(
            prompt=request.prompt,
            response=request.responses[index],
            label=request.ground_truth,
            metadata=request.row,
            index=index,
        )

    @property
    def all_ids(self) -> list[list[int]]:
        """Token ids of every response; none in a trial, where no model wrote it."""
        return [list(ids) for ids in self.request.response_ids] or [[] for _ in self.request.responses]

    def for_each(self, value: Any) -> list[Any]:
        return [value] * len(self.request.responses)


OWN: dict[str, Callable[[_Call], Any]] = {
    "response": lambda call: call.response,
    "responses": lambda call: list(call.request.responses),
    "ground_truth": lambda call: call.request.ground_truth,
    "prompt": lambda call: call.request.prompt,
    "messages": lambda call: call.request.messages,
    "row": lambda call: dict(call.request.row),
    "tag": lambda call: call.request.tag,
    "id": lambda call: call.request.id,
    "prompt_text": lambda call: call.request.prompt_text or call.request.prompt,
    "prompt_ids": lambda call: list(call.request.prompt_ids),
    "response_ids": lambda call: call.all_ids[call.index],
    "config": lambda call: call.config,
}
"""Parameters that a reward function may have; any other name is a column of the data."""

VERL: dict[str, Callable[[_Call], Any]] = {
    "solution_str": lambda call: call.response,
    "data_source": lambda call: call.request.row.get("data_source", call.request.tag),
    "extra_info": lambda call: call.request.row.get("extra_info") or {},
}
"""Parameters of verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

TRL: dict[str, Callable[[_Call], Any]] = {
    "completions": lambda call: [_as_completion(call.request, text) for text in call.request.responses],
    "prompts": lambda call: call.for_each(_as_prompt(call.request)),
    "completion_ids": lambda call: call.all_ids,
}
"""Parameters of TRL's `reward(prompts, completions, **columns)`; every column is a list with an item per response."""

SLIME: dict[str, Callable[[_Call], Any]] = {
    "args": lambda call: call.config,
    "sample": lambda call: call.sample(call.index),
    "samples": lambda call: [call.sample(index) for index in range(len(call.request.responses))],
}
"""Parameters of slime's `async rm(args, sample)` and of its form for groups."""

ALL = {**OWN, **VERL, **TRL, **SLIME}

LISTS = OWN.keys() - {"config", "responses", "response_ids"}
"""Parameters that are lists, as columns are, for a function in TRL's form."""

READS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("response", "responses", "ground_truth", "config", "args", "solution_str"), frozenset()),
    **dict.fromkeys(("prompt", "messages", "prompts", "completions"), frozenset({"question"})),
    "row": frozenset({"row"}),
    "tag": frozenset({"tag"}),
    **{name: frozenset({name}) for name in ("id", "prompt_text", "prompt_ids", "response_ids")},
    "completion_ids": frozenset({"response_ids"}),
    "data_source": frozenset({"row", "tag"}),
    "extra_info": frozenset({"row"}),
    **dict.fromkeys(("sample", "samples"), frozenset({"question", "row"})),
}
"""Attributes of a request that a parameter reads, besides the responses and the ground truth."""

ONE_RESPONSE = {"response", "solution_str", "sample"}
"""A function with one of these is called for each response."""

ALL_RESPONSES = {"responses", "completions", "samples"}
"""A function with one of these and none of ONE_RESPONSE is called once for a group and returns a list."""


THINK, THINK_END = "<think>", "</think>"
"""Start and end of the reasoning of a response."""


def without_reasoning(response: str) -> str:
    """The text after the last THINK_END, up to a THINK that is not closed; all of it where there is neither."""
    return response.rpartition(THINK_END)[2].partition(THINK)[0]


class TooLong(float):
    """The score of a response that takes a built-in comparison too long: it is wrong, and counted as TOO_LONG."""


TOO_LONG = "too_long_to_compare"
"""Metric of the built-in comparisons: 1 for such a response, 0 for others."""

MOST_METRICS = 1_000
"""Numbers that a reward may return with one score."""


class RewardFunctionError(RunError, ValueError):
    """The configured reward function does not exist or cannot be called."""


class RewardFunction:
    """A user's reward function with the arguments that it asks for.

    Attributes:
        function: as it was given.
        name: of the function.
        where: `file:line` of its definition.
        is_async: it is a coroutine function, so that several calls run at the same time.
        per_group: it is called once for all responses of a group and returns a list.
        sees_group: it reads all responses of a group.
        reads: attributes of a request that it reads, besides the responses and the ground truth.
    """

    def __init__(self, function: Callable[..., Any], config: RewardConfig) -> None:
        """Reads the parameters.

        Raises:
            RewardFunctionError: it takes no response, or a parameter that cannot be passed by name.
        """
        self.function, self._config = function, config
        self.name = getattr(function, "__name__", type(function).__name__)
        self.where = definition_of(function)
        self._compares = is_comparison(f"{getattr(function, '__module__', '')}:{self.name}")
        if isinstance(function, type):
            text = f"is a class; add the line `score = {self.name}()` and name that, as module:score"
            raise RewardFunctionError(self._located(text))
        method = getattr(type(function), "__call__")  # noqa: B004 B009 (of an object that is called)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise RewardFunctionError(self._located(f"its parameters are unknown: {error}")) from error
        kinds = inspect.Parameter
        for parameter in parameters:
            if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL):
                raise RewardFunctionError(
                    self._located(f"parameter {parameter} has no name to pass it by; use plain parameters")
                )
        self._takes_all_columns = any(parameter.kind == kinds.VAR_KEYWORD for parameter in parameters)
        named = [parameter for parameter in parameters if parameter.kind != kinds.VAR_KEYWORD]
        self._parameters = {parameter.name: parameter.default is not kinds.empty for parameter in named}
        names = self._parameters.keys()
        if not names & (ONE_RESPONSE | ALL_RESPONSES):
            raise RewardFunctionError(
                self._located("has no parameter for the response; name it response, or responses for all of a group")
            )
        self.per_group = not names & ONE_RESPONSE
        self.sees_group = bool(names & ALL_RESPONSES)
        self._columns_are_lists = "completions" in names
        of_row = self._takes_all_columns or any(name not in ALL for name in names)
        if self._columns_are_lists:
            of_row = of_row or bool(names & LISTS)
        self.reads = frozenset({"row"} if of_row else ()).union(*(READS[name] for name in names & READS.keys()))

    def call(self, request: RewardRequest, index: int | None) -> Any:
        """Calls the function for the response at `index`, or for all where it is None; a coroutine is not awaited.

        Raises:
            RewardFunctionError: it asks for a column that the data does not have.
        """
        return self.function(**self._arguments(_Call(request, index or 0, self._config)))

    def _arguments(self, call: _Call) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        row = call.request.row
        may_lack_truth = self._parameters.get("ground_truth", True) or built_in_of(self._config.function)
        if call.request.ground_truth is None and not may_lack_truth and "ground_truth" not in row:
            text = (
                f"asks for ground_truth, and row {call.request.id} has none; name its column in data_args.ground_truth"
            )
            raise RewardFunctionError(self._located(text))
        for name, has_default in self._parameters.items():
            if name == "response_ids" and self.per_group:
                arguments[name] = call.all_ids
            elif name in ALL and not (self._columns_are_lists and name in LISTS):
                arguments[name] = ALL[name](call)
            elif name in row or name in OWN:
                value = row[name] if name in row else OWN[name](call)
                arguments[name] = call.for_each(value) if self._columns_are_lists else value
            elif not has_default:
                raise RewardFunctionError(self._unknown(name, row))
        if self._takes_all_columns:
            for name in row.keys() - arguments.keys():
                arguments[name] = call.for_each(row[name]) if self._columns_are_lists else row[name]
        return arguments

    def _unknown(self, name: str, row: Mapping[str, Any]) -> str:
        columns = ", ".join(row) or "none"
        like = nearest(name, [*OWN, *row])
        hint = f"; did you mean {like}?" if like else ""
        return self._located(
            f"asks for {name}, which is neither a column of the data ({columns}) nor one of {', '.join(OWN)}{hint}"
        )

    def outcomes(self, value: Any, count: int | None) -> list[RewardOutcome]:
        """Outcomes of a returned value: of one response, or of `count`."""
        if count is None:
            return [self._outcome(value)]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            return [self._wrong(value, f"a list of {count} scores, one for each response")] * count
        if len(values) != count:
            text = self._located(f"returned {len(values)} scores for {count} responses; return one for each")
            return [RewardOutcome(None, "wrong_type", text)] * count
        return [self._outcome(item) for item in values]

    def _outcome(self, value: Any) -> RewardOutcome:
        """A finite real number is a score, everything else a failure."""
        metrics: dict[str, float] = {}
        if isinstance(value, Mapping):
            if SCORE not in value:
                keys = ", ".join(map(str, value)) or "none"
                text = f"returned a dictionary without the key {SCORE!r}; its keys are {keys}"
                return RewardOutcome(None, "wrong_type", self._located(text))
            if len(value) > MOST_METRICS:
                text = f"returned a dictionary with {len(value)} keys; return at most {MOST_METRICS}"
                return RewardOutcome(None, "wrong_type", self._located(text))
            others = {str(name): _plain(item) for name, item in value.items() if name != SCORE}
            metrics = {name: float(item) for name, item in others.items() if _is_finite(item) and is_trainable(item)}
            value = value[SCORE]
        if self._compares:
            metrics[TOO_LONG] = float(isinstance(value, TooLong))
        value = _plain(value)
        if not isinstance(value, numbers.Real):
            return self._wrong(value, f"one number, or a dictionary with {SCORE!r}")
        if not _is_finite(value):
            shown = "a number too large for a float" if isinstance(value, int) else float(value)
            return RewardOutcome(None, "not_finite", self._located(f"returned {shown}; return a finite number"))
        if not is_trainable(float(value)):
            text = f"returned {float(value):g}; return a number of at most {LARGEST_REWARD:g} in size"
            return RewardOutcome(None, "not_finite", self._located(text))
        return RewardOutcome(float(value), metrics=metrics)

    def _wrong(self, value: Any, wanted: str) -> RewardOutcome:
        kind = "None" if value is None else f"a {type(value).__name__}"
        size = f" of length {len(value)}" if isinstance(value, Sized) and getattr(value, "shape", None) != () else ""
        hint = ", for example with .item()" if hasattr(value, "item") else ""
        return RewardOutcome(None, "wrong_type", self._located(f"returned {kind}{size}; return {wanted}{hint}"))

    def _located(self, text: str) -> str:
        return f"{self.where}: {self.name} {text}".removeprefix(": ")


def _plain(value: Any) -> Any:
    """The number of an array or tensor without dimensions; numpy's True and False are such, and no numbers."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def _as_completion(request: RewardRequest, text: str) -> Any:
    """A response in the form of its prompt: text, or a list of one message."""
    return text if request.question.messages is None else [{"role": "assistant", "content": text}]


def _as_prompt(request: RewardRequest) -> Any:
    return request.prompt if request.question.messages is None else request.messages
