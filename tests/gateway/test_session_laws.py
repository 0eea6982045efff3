"""Laws of sessions, whatever an agent does with its conversations.

Ids only grow; every sampled token is trained on once; a branch has the ids that the engine saw.
"""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.gateway.history import repeated_tokens
from roll.gateway.protocol import RequestError, read_request, wire
from roll.gateway.session import AgentSession
from roll.gateway.tool_parsers import ParsedText, hermes, llama3_json
from roll.rollout.types import NOT_SAMPLED, GenerateResult
from tests.gateway.conversations import ADD, ScriptedPolicy, byte_tokenizer, call_text, dialogue, spec

TOKENIZER = byte_tokenizer()
DIALOGUE = dialogue(TOKENIZER)
TOOLS = [[], [ADD], [ADD, {"type": "function", "function": {"name": "find"}}]]

ANSWERS = st.one_of(
    st.sampled_from(["abc", " in 42", "ok ", "", "tool ab\n"]),
    st.builds(
        lambda a, b, text: text + call_text("add", {"a": a, "b": {"x": b}}) + text,
        st.integers(0, 2), st.sampled_from([1, None, "ab", True]), st.sampled_from(["", " abc "]),
    ),
    st.sampled_from(["<think>abc</think>42", "<think>in", "</think>ab", "<tool_call>\n{no}\n</tool_call>"]),
    st.just(call_text("add", {"a": 1}) + "\n" + call_text("find", {"q": "ab"})),
)  # fmt: skip
"""What the policy says; the same text comes again, so that siblings may be equal."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "continue", "again", "fork", "rewrite", "compact", "agent"]),
        st.integers(0, 50),  # which conversation, and where
        st.integers(0, 2**20),  # how its answers are spelled
        st.lists(st.tuples(ANSWERS, st.sampled_from(["stop", "stop", "cut", "abort"])), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=14,
)


def respelled(message: dict, bits: int) -> dict:
    """A message as clients may send it back: other spacing, order, ids, nulls, parts, without thoughts."""
    if message["role"] != "assistant":
        return message
    sent = copy.deepcopy(message)
    if bits & 1:
        sent.pop("reasoning_content", None)
    if bits & 2 and isinstance(sent["content"], str) and sent["content"].strip():
        sent["content"] = [{"type": "text", "text": sent["content"].strip()}]
    elif not (sent["content"] or "").strip() and bits & 4:
        sent["content"] = None if sent.get("tool_calls") else ""
    for call in sent.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        arguments = {key: value for key, value in reversed(arguments.items()) if value is not None or bits & 8}
        call["function"]["arguments"] = json.dumps(arguments, indent=2 if bits & 16 else None)
        if bits & 32:
            call["id"] = "other"
    return sent | {"refusal": None, "audio": None}


def plain(message: dict) -> str:
    """What makes messages equal, written down a second time."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = [
        (call["function"]["name"], json.dumps(without_null(json.loads(call["function"]["arguments"])), sort_keys=True))
        for call in message.get("tool_calls") or []
    ]
    return repr((message["role"], text.strip(), calls))


def without_null(value):
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return value


class Client:
    """An agent with several conversations, and what is known of the ids of its answers."""

    def __init__(self) -> None:
        self.session = AgentSession(spec(TOKENIZER), DIALOGUE)
        self.policy = ScriptedPolicy(TOKENIZER)
        self.talks: list[tuple[int, list[dict]]] = []  # tools and messages, each ending with an answer
        self.known: list[tuple[int, list[str], list[int], int]] = []  # tools, messages, ids up to their end, last id
        self.seeds: set[tuple[int, ...]] = set()

    def choose(self, kind: str, where: int) -> tuple[int, list[dict]]:
        """Tools and messages of the next request."""
        new = {"role": "user", "content": f"abc {where % 3}"}
        if kind == "agent" or not self.talks:
            return where % 3, [{"role": "system", "content": "You add."}, new][where % 2 :]
        tools, messages = self.talks[where % len(self.talks)]
        if kind == "compact":
            return tools, [{"role": "user", "content": "summary: " + str(messages[-1]["content"])}]
        asked = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        at = asked[where % len(asked)]
        if kind == "again":
            return tools, messages[:at]
        if kind == "fork":
            return tools, [*messages[: at - 1], {"role": "user", "content": "in stead"}]
        if kind == "rewrite":
            return tools, [*messages[: at - 1], {"role": "user", "content": "rewritten"}, *messages[at:], new]
        calls = messages[-1].get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "42 tool"} for call in calls]
        return tools, [*messages, *(results or [new])]

    def send(self, tools: int, messages: list[dict], bits: int, answers: list[tuple[str, str]]) -> None:
        sent = [respelled(message, bits) for message in messages]
        turn = self.session.ask(read_request({"messages": sent, "tools": TOOLS[tools], "n": len(answers)}))
        self.check_prompt(tools, sent, turn.prompt)
        if any(how == "abort" for _, how in answers):
            aborted = [GenerateResult(each.request_id, [], [], [], "abort", error="lost") for each in turn.requests]
            with pytest.raises(RequestError, match="lost"):
                self.session.answer(turn, aborted)
            return
        cuts = [how == "cut" and bool(text) for text, how in answers]
        for request in turn.requests:
            assert (seeded := (request.seed, *request.prompt_ids)) not in self.seeds, "it would be the same answer"
            self.seeds.add(seeded)
        results = [
            self.policy.result(request, text, cut)
            for request, (text, _), cut in zip(turn.requests, answers, cuts, strict=True)
        ]
        for result, choice in zip(results, self.session.answer(turn, results).choices, strict=True):
            talk = [*messages, wire(choice.message)]
            self.talks.append((tools, talk))
            ids = [*turn.prompt, *result.response_ids]
            self.known.append((tools, [plain(message) for message in talk], ids, result.response_ids[-1]))

    def check_prompt(self, tools: int, sent: list[dict], prompt: list[int]) -> None:
        """It is the ids of the longest answered beginning of the messages, and those of the new ones."""
        seen = [plain(message) for message in sent]
        begun = [each for each in self.known if each[0] == tools and seen[: len(each[1])] == each[1]]
        chat, read = DIALOGUE.chat, read_request({"messages": sent, "tools": TOOLS[tools]})
        if not begun:
            assert prompt == chat.start(read.messages, read.tools)
            return
        longest = max(len(each[1]) for each in begun)
        new = read.messages[longest:]
        assert prompt in [
            [*ids, *chat.follow(last, new, read.tools)] for _, talk, ids, last in begun if len(talk) == longest
        ]

    def check_rows(self) -> None:
        end, given = self.session.end(), self.policy.given
        rows = end.trajectory.rows if end.trajectory else []
        trained = Counter(value for row in rows for turn in row.turns for value in row.log_probs[turn.start : turn.end])
        assert trained == Counter(value for _, result in given for value in result.log_probs)
        assert set(trained.values()) <= {1}
        seen = {result.log_probs[0]: [*prompt, *result.response_ids] for prompt, result in given}
        for row in rows:
            sampled = {at for turn in row.turns for at in range(turn.start, turn.end)}
            assert [at for at, version in enumerate(row.versions) if version != NOT_SAMPLED] == sorted(sampled)
            assert row.turns and row.turns[-1].end == len(row.ids) == len(row.log_probs) == len(row.versions)
            for turn in row.turns:
                assert row.ids[: turn.end] == seen[row.log_probs[turn.start]]
        distinct = {tuple(row.ids[: end + 1]) for row in rows for end in range(len(row.ids))}
        if rows:
            assert repeated_tokens(end.trajectory) == sum(len(row.ids) for row in rows) - len(distinct)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(STEPS)
def test_ids_only_grow_and_every_token_is_trained_on_once(steps):
    client = Client()
    for kind, where, bits, answers in steps:
        client.send(*client.choose(kind, where), bits, answers)
        client.check_rows()
    assert client.session.requests == len(steps)


def test_an_append_only_conversation_is_one_branch_and_repeats_nothing():
    client = Client()
    for text in ("abc", call_text("add", {"a": 1}), "42"):
        client.send(*client.choose("continue", 0), 21, [(text, "stop")])
        client.talks = client.talks[-1:]
    end = client.session.end()
    assert end.trajectory.branches == [] and end.metrics["context_tokens_repeated"] == 0
    assert len(end.trajectory.turns) == 3


def test_reencoding_the_texts_of_answers_would_give_other_ids():
    """Else the laws would hold for a gateway that encodes every request anew."""
    client = Client()
    client.send(0, [{"role": "user", "content": "in"}], 0, [("abc", "stop")])
    _, messages = client.talks[0]
    turn = client.session.ask(read_request({"messages": [*messages, {"role": "user", "content": "42"}]}))
    again = DIALOGUE.chat.start([*messages, {"role": "user", "content": "42"}])
    assert TOKENIZER.decode(turn.prompt) == TOKENIZER.decode(again) and turn.prompt != again


@pytest.mark.parametrize("parse", [hermes, llama3_json])
@pytest.mark.parametrize("levels", [100, 100_000])
def test_a_call_nested_too_deeply_is_content(parse, levels):
    """A model that repeats brackets writes such texts."""
    call = '{"name": "plus", "arguments": {"a": ' + "[" * levels + "]" * levels + "}}"
    text = f"<tool_call>{call}</tool_call>" if parse is hermes else call
    assert parse(text, ()) == ParsedText(text, unread=int(parse is hermes))
