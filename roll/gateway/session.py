"""One session: given a request it says what to sample, given the results what to answer. No clock, no engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from roll.configs.pipeline import role_seed
from roll.datasets.records import DatasetError
from roll.datasets.stop_strings import text_until_stop
from roll.datasets.templates import ConversationEncoder
from roll.gateway.history import Continuation, History, readable, repeated_tokens
from roll.gateway.protocol import NEUTRAL, ChatRequest, Completion, Completions, RequestError
from roll.gateway.tool_parsers import ReasoningParser, ToolParser, answered
from roll.rollout.agents.sessions import SessionEnd, SessionSpec
from roll.rollout.ledger import GENERATION_FAILED
from roll.rollout.types import ROUTING_INCOMPLETE, GenerateRequest, GenerateResult, SamplingParams, missing_routing

REQUESTS_EXHAUSTED, CONTEXT_LENGTH = "requests_exhausted", "context_length_exceeded"
"""Refusals after which an agent that fails has failed for this reason."""


TOOLS_NOT_SHOWN = "data_args.template: does not show tools to the model; use one that does, such as qwen2_5"


@dataclass(frozen=True)
class Dialogue:
    """How texts become ids and ids become messages; shared by all sessions.

    Attributes:
        chat: encodes messages.
        decode: the text of sampled ids up to the first of some stop strings, without the tokens that end an answer.
        parse_tools: reads tool calls from a text; None: there are none.
        parse_thoughts: reads thoughts from a text; None: they are content.
        strict: whether a request that asks for other sampling than the run's is an error.
    """

    chat: ConversationEncoder
    decode: Callable[[list[int], tuple[str, ...]], str]
    parse_tools: ToolParser | None = None
    parse_thoughts: ReasoningParser | None = None
    strict: bool = False


@dataclass(frozen=True)
class AskedTurn:
    """What is sent to the engines for a request: one `GenerateRequest` for each answer that is wanted."""

    request: ChatRequest
    place: Continuation
    context: list[int]
    prompt: list[int]
    requests: list[GenerateRequest]
    numbers: list[int]
    stops: frozenset[int] = frozenset()


@dataclass
class AgentSession:
    """The conversations of one agent with the policy."""

    spec: SessionSpec
    dialogue: Dialogue
    history: History = field(default_factory=History)
    requests: int = 0
    overridden: int = 0
    joined: int = 0
    unread: int = 0
    cut: int = 0
    failure: tuple[str, str] | None = None
    warnings: dict[str, str] = field(default_factory=dict)
    _asked: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the answers that were asked for, by the hash of their prompt."""

    def ask(self, request: ChatRequest) -> AskedTurn:
        """What to sample for a request.

        Raises:
            RequestError: it cannot be answered.
        """
        self.requests += 1
        most = self.spec.max_requests
        if most is not None and self.requests > most:
            raise self._refused(REQUESTS_EXHAUSTED, f"this session may send {most} requests (max_requests)")
        sampling = self._sampling(request)
        for kind, reason in request.ignored.items():
            self.warnings.setdefault(kind, reason)
        place = self.history.place(request.messages, request.tools)
        context = self._encode(request, place)
        prompt = [*(place.answer.ids() if place.answer is not None else ()), *context]
        sampling = replace(sampling, max_new_tokens=self._room(request, len(prompt)))
        depth = len(place.answer.answers()) if place.answer is not None else 0
        taken = self._asked.setdefault(hash(tuple(prompt)), set())
        numbers = list(itertools.islice((each for each in itertools.count() if each not in taken), request.count))
        taken.update(numbers)
        asked = [self._generate(number, depth, prompt, sampling) for number in numbers]
        stops = frozenset(sampling.stop_token_ids) - {*self.spec.sampling.stop_token_ids}
        return AskedTurn(request, place, context, prompt, asked, numbers, stops)

    def failed(self, turn: AskedTurn, message: str, reason: str = GENERATION_FAILED) -> RequestError:
        """The refusal of a request that the engines did not answer; the numbers of its answers are used again."""
        self._asked[hash(tuple(turn.prompt))].difference_update(turn.numbers)
        self.failure = reason, f"{self.spec.name}: {message}"
        return RequestError(GENERATION_FAILED, message, 503)

    def _generate(self, number: int, depth: int, prompt: list[int], sampling: SamplingParams) -> GenerateRequest:
        """The seed of an answer is that of its number in its branch, and of its number among those to the same ids."""
        spec = self.spec
        seed = role_seed(spec.seed, spec.name, depth, *([number] if number else []))
        return GenerateRequest(f"{spec.name}-{self.requests}-{number}", prompt, sampling, seed, spec.version)

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        own = self.spec.sampling
        for name, value in request.sampling.items():
            neutral = NEUTRAL[name]
            used: float = getattr(own, name) if neutral is None else neutral
            if value == used or (name == "top_k" and value <= 0 and used <= 0):
                continue
            if self.dialogue.strict:
                role = "actor_infer" if self.spec.version is not None else "validation"
                path = f"{role}.generating_args.{name}" if NEUTRAL[name] is None else "gateway.request_sampling: strict"
                raise self._refused("sampling", f"{name} {value}: this run samples at {used} ({path})")
            self.overridden += 1
        encoded = self.dialogue.chat.encoder.encode_text(list(request.stop))
        tokens = [ids[0] for ids in encoded if len(ids) == 1]
        strings = [text for text, ids in zip(request.stop, encoded, strict=True) if len(ids) != 1]
        return replace(
            own,
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *tokens))),
            stop_strings=tuple(dict.fromkeys((*own.stop_strings, *strings))),
        )

    def _encode(self, request: ChatRequest, place: Continuation) -> list[int]:
        chat, messages = self.dialogue.chat, request.messages[place.known :]
        try:
            if place.answer is None or place.answer.result is None:
                ids = chat.start(messages, request.tools)
                if request.tools and ids == chat.start(messages):
                    self.warnings.setdefault("tools", TOOLS_NOT_SHOWN)
                return ids
            return chat.follow(place.answer.result.response_ids[-1], messages, request.tools)
        except DatasetError as error:
            raise self._refused("template", str(error)) from error

    def _room(self, request: ChatRequest, prompt: int) -> int:
        left = self.spec.sequence_length - prompt
        if left < 1:
            message = f"the messages have {prompt} tokens; this model's maximum context length is "
            raise self._refused(CONTEXT_LENGTH, f"{message}{self.spec.sequence_length} tokens (sequence_length)")
        return min(left, self.spec.sampling.max_new_tokens, request.max_tokens or left)

    def _refused(self, code: str, message: str) -> RequestError:
        self.warnings.setdefault(code, message)
        if code in (REQUESTS_EXHAUSTED, CONTEXT_LENGTH):
            self.failure = code, f"{self.spec.name}: {message}"
        return RequestError(code, message)

    def answer(self, turn: AskedTurn, results: Sequence[GenerateResult]) -> Completions:
        """What to answer; the results become part of the tree.

        Raises:
            RequestError: one of them is no sample; then none is taken.
        """
        failed = next((each for each in results if each.finish_reason == "abort" or not each.response_ids), None)
        if failed is not None:
            raise self.failed(turn, failed.error or "the answer is empty, without even a stop token")
        if lack := next(filter(None, map(missing_routing, turn.requests, results)), None):
            raise self.failed(turn, lack, ROUTING_INCOMPLETE)
        pairs = zip(turn.requests, results, strict=True)
        return Completions([self._completion(turn, asked, result) for asked, result in pairs], len(turn.prompt))

    def _completion(self, turn: AskedTurn, asked: GenerateRequest, result: GenerateResult) -> Completion:
        dialogue, request, ids = self.dialogue, turn.request, result.response_ids
        text = dialogue.decode(ids[:-1] if ids[-1] in turn.stops else ids, self.spec.sampling.stop_strings)
        text = text_until_stop(text, request.stop, keep=False)
        parse = dialogue.parse_tools if request.calls_tools else None
        call_id = f"call_{(asked.seed or 0) % 16**8:08x}"
        message, unread = answered(text, request.tools, parse, dialogue.parse_thoughts, call_id)
        self.unread += unread
        self.cut += result.finish_reason == "length"
        read = readable(request.messages, turn.place.known)
        self.history.add_answer(turn.place, turn.context, result, dialogue.decode(ids, ()), message, read)
        reason = "length" if result.finish_reason == "length" else "tool_calls" if "tool_calls" in message else "stop"
        return Completion(message, reason, len(ids), result.cached_prompt_tokens)

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(node.result.response_ids) for node in self.history.sampled if node.result is not None)

    def end(self) -> SessionEnd:
        """What the session leaves.

        Raises:
            RuntimeError: its rows do not train on every sampled token once.
        """
        trajectory = self.history.trajectory()
        rows = [] if trajectory is None else trajectory.rows
        trained = sum(turn.end - turn.start for row in rows for turn in row.turns)
        if trained != self.sampled_tokens:
            raise RuntimeError(f"{self.spec.name}: {self.sampled_tokens} tokens were sampled, its rows have {trained}")
        metrics = {
            "requests": float(self.requests),
            "branches": float(len(rows)),
            "context_tokens_repeated": 0.0 if trajectory is None else float(repeated_tokens(trajectory)),
            "overridden_sampling": float(self.overridden),
            "retries_joined": float(self.joined),
            "unread_tool_calls": float(self.unread),
            "cut_answers": float(self.cut),
        }
        return SessionEnd(trajectory, self.failure, metrics, warnings=self.warnings)
