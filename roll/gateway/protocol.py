"""OpenAI's chat completions: requests as they are checked, answers, streamed chunks and errors."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.base.json_values import read_json

MODEL = "policy"
"""The model that the gateway serves."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

CONSTRAINTS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf", "grammar"),
    *("structural_tag", "structured_outputs", "logit_bias"),
)
"""Fields of OpenAI, SGLang and vLLM that constrain decoding."""

NEUTRAL: dict[str, float | None] = {
    **{"temperature": None, "top_p": None, "top_k": None, "min_p": 0.0, "repetition_penalty": None},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
}
"""Fields that change the distribution, and the value that does not; None: that of the run."""

CONSTRAINED = "constrained decoding would sample from another policy than the one trained; leave it out"
NOT_SERVED = "not served here; use /v1/chat/completions with text"


class RequestError(Exception):
    """A request that is refused.

    Attributes:
        code: kind of the refusal.
        status: of the HTTP answer.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request as the session reads it.

    Attributes:
        messages: with text content, and arguments of tool calls as JSON values.
        tools: as the template shows them.
        max_tokens: of one answer; None: as many as there is room for.
        stop: texts that end an answer.
        count: answers that are wanted.
        sampling: fields that change the distribution.
        calls_tools: whether tool calls are read from the answers.
        stream: whether the answer is sent in chunks; `usage` whether with their number of tokens.
        ignored: what is asked and not done, by kind, with the reason.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    count: int = 1
    sampling: Mapping[str, float] = field(default_factory=dict)
    calls_tools: bool = True
    stream: bool = False
    usage: bool = False
    ignored: Mapping[str, str] = field(default_factory=dict)


def read_request(body: Any) -> ChatRequest:
    """A checked request.

    Raises:
        RequestError: it is malformed, or asks for what is not served.
    """
    try:
        return _read_request(body)
    except (TypeError, AttributeError) as error:
        raise RequestError("invalid_body", f"the body is no chat completion of OpenAI: {error}") from error


def _read_request(body: Any) -> ChatRequest:
    if not isinstance(body, dict):
        raise RequestError("invalid_body", "the body is not a JSON object")
    _check_constraints(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("invalid_messages", "messages: is not a list of at least one message")
    read = tuple(_message(message, number) for number, message in enumerate(messages))
    if read[-1]["role"] == "assistant":
        raise RequestError("invalid_messages", "messages: the last one is of the assistant; end with user or tool")
    stop = body.get("stop") or ()
    return ChatRequest(
        messages=read,
        tools=tuple(_tools(body.get("tools"))),
        max_tokens=_integer(body, "max_completion_tokens") or _integer(body, "max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
        count=_integer(body, "n") or 1,
        sampling={name: _number(body, name) for name in NEUTRAL if body.get(name) is not None},
        calls_tools=body.get("tool_choice") != "none",
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        ignored=dict(_ignored(body)),
    )


def _ignored(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if body.get("model", MODEL) != MODEL:
        yield "model", f"model {body['model']} is answered by the policy"
    if body.get("parallel_tool_calls") is False:
        yield "parallel_tool_calls", "parallel_tool_calls: false is ignored; decoding is not constrained"


def _check_constraints(body: Mapping[str, Any]) -> None:
    kind = (body.get("response_format") or {}).get("type", "text")
    if kind != "text" or body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError("constrained_decoding", CONSTRAINED)
    if any(body.get(name) for name in CONSTRAINTS):
        raise RequestError("constrained_decoding", CONSTRAINED)
    if body.get("logprobs") or body.get("functions"):
        name = "logprobs" if body.get("logprobs") else "functions"
        raise RequestError("not_served", f"{name}: {NOT_SERVED if name == 'logprobs' else 'use tools'}")


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise RequestError("invalid_value", f"{name}: {value!r} is not a whole number of at least 1")
    return value


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError("invalid_value", f"{name}: {value!r} is not a number")
    return value


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    for tool in tools or ():
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            raise RequestError("invalid_tools", "tools: each needs type function, and a function with a name")
        function = {key: value for key, value in tool["function"].items() if key != "strict" and value is not None}
        yield {"type": "function", "function": function}


def _message(message: Any, number: int) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise RequestError("invalid_messages", f"messages[{number}]: role {role!r} is not one of {', '.join(ROLES)}")
    found: dict[str, Any] = {"role": ROLES[role], "content": _text(message.get("content"), number)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call, number) for call in calls]
    elif found["content"] is None:
        found["content"] = ""
    if role == "tool" and message.get("tool_call_id"):
        found["tool_call_id"] = str(message["tool_call_id"])
    return found


def _text(content: Any, number: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError("not_served", f"messages[{number}]: content of type {kind}: {NOT_SERVED}")
    return "".join(part["text"] for part in parts)


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("invalid_messages", f"messages[{number}]: a tool call has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments or "{}")
        except ValueError:
            pass  # the model's own text, which is no JSON
    read = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id")), "type": "function", "function": read}


@dataclass(frozen=True)
class Completion:
    """One answer of the policy.

    Attributes:
        message: role, content, tool calls with arguments as JSON values, and thoughts.
        finish_reason: stop, length or tool_calls.
        tokens: that were sampled.
        cached: tokens of the prompt that the engine had in its cache.
    """

    message: Mapping[str, Any]
    finish_reason: str
    tokens: int
    cached: int = 0


@dataclass(frozen=True)
class Completions:
    """The answers to a request, in OpenAI's form."""

    choices: Sequence[Completion]
    prompt_tokens: int

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {"index": index, "message": wire(each.message), "finish_reason": each.finish_reason, "logprobs": None}
            for index, each in enumerate(self.choices)
        ]
        return {**_head("chat.completion"), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens."""
        sampled = sum(each.tokens for each in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": max((each.cached for each in self.choices), default=0)},
        }

    def chunks(self, usage: bool) -> Iterator[dict[str, Any]]:
        """The answer as chunks of a stream."""
        head = _head("chat.completion.chunk")
        for index, each in enumerate(self.choices):
            delta = wire(each.message)
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": each.finish_reason}]}
        if usage:
            yield {**head, "choices": [], "usage": self.usage()}


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def wire(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of tool calls as JSON text."""
    sent = dict(message)
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def models() -> dict[str, Any]:
    """The answer of /v1/models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "roll"}]}
