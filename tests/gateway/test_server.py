"""The server as unmodified clients see it, with a scripted policy in place of engines."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest

from roll.gateway.server import MAX_BODY_BYTES, GatewayServer
from roll.rollout.agents.sessions import GatewayDiedError
from roll.rollout.types import GenerateResult
from tests.gateway.conversations import ADD, ScriptedPolicy, byte_tokenizer, call_text, dialogue, spec

TOKENIZER = byte_tokenizer()
ASKED = [{"role": "user", "content": "ab?"}]


class Engines:
    """Answers the texts in their order; `hold` keeps requests waiting, and an error is raised."""

    def __init__(self, *texts: str | Exception) -> None:
        self.texts, self.policy, self.requests = list(texts), ScriptedPolicy(TOKENIZER), []
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, requests, engine):
        self.requests += requests
        await self.hold.wait()
        answers = [self.texts.pop(0) for _ in requests]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        pairs = zip(requests, answers, strict=True)
        return [self.policy.result(each, text, len(text) > each.sampling.max_new_tokens) for each, text in pairs]


@asynccontextmanager
async def serving(*texts, strict=False, **limits):
    engines = Engines(*texts)
    server = GatewayServer(dialogue(TOKENIZER, strict=strict), engines)
    await server.start()
    try:
        address = await server.open(spec(TOKENIZER, **limits))
        yield server, address, engines
    finally:
        await server.stop()


def client(address, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.key, **options)


def ask(address, messages=ASKED, retries=0, **fields):
    return client(address, max_retries=retries).chat.completions.create(model="policy", messages=messages, **fields)


def test_the_sync_client_calls_a_tool_and_continues():
    async def run():
        async with serving("in " + call_text("add", {"a": 40, "b": 2}), "42") as (server, address, _):
            await asyncio.to_thread(play, address)
            return await server.finish(address)

    def play(address):
        policy, messages = openai.OpenAI(base_url=address.base_url, api_key=address.key), list(ASKED)
        assert [model.id for model in policy.models.list()] == ["policy"]
        answer = policy.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content == "in"
        [call] = answer.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 40, "b": 2})
        messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        raw = policy.chat.completions.with_raw_response.create(model="policy", messages=messages, tools=[ADD])
        assert raw.status_code == 200 and raw.parse().choices[0].message.content == "42"
        usage = raw.parse().usage
        assert usage.completion_tokens == 3 and usage.total_tokens == usage.prompt_tokens + 3

    end = asyncio.run(run())
    assert len(end.trajectory.turns) == 2 and not end.trajectory.branches
    assert end.metrics["requests"] == 2 and len(end.seconds) == 2


def test_a_stream_has_the_whole_answer_with_usage():
    async def run():
        async with serving("<think>ab</think>in" + call_text("add", {})) as (_, address, _engines):
            options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [ADD]}
            return [chunk async for chunk in await ask(address, **options)]

    chunks = asyncio.run(run())
    delta = chunks[0].choices[0].delta
    assert (delta.content, delta.reasoning_content) == ("in", "ab")
    assert delta.tool_calls[0].index == 0 and delta.tool_calls[0].function.name == "add"
    assert chunks[1].choices[0].finish_reason == "tool_calls" and chunks[-1].usage.completion_tokens > 0


CONSTRAINED = "constrained decoding would sample from another policy than the one trained; leave it out"
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
REFUSED = [
    ({"response_format": {"type": "json_object"}}, CONSTRAINED),
    ({"tool_choice": "required", "tools": [ADD]}, CONSTRAINED),
    ({"extra_body": {"guided_regex": "a+"}}, CONSTRAINED),
    ({"messages": IMAGE}, "content of type image_url: not served here; use /v1/chat/completions with text"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, "the last one is of the assistant"),
    ({"messages": [{"role": "narrator", "content": "a"}]}, "role 'narrator' is not one of"),
    ({"temperature": 0.2}, "temperature 0.2: this run samples at 1.0 (actor_infer.generating_args.temperature)"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_is_refused_says_why(fields, message):
    async def run():
        async with serving(strict=True) as (_, address, _engines):
            await ask(address, **({"messages": ASKED} | fields))

    with pytest.raises(openai.BadRequestError) as refused:
        asyncio.run(run())
    assert message in refused.value.body["message"] and refused.value.code


@pytest.mark.parametrize("path", ["responses", "completions", "messages"])
def test_other_endpoints_name_the_one_that_is_served(path):
    async def run():
        async with serving() as (_, address, _engines):
            await client(address, max_retries=0).post(f"/{path}", cast_to=object, body={"a": 1})

    with pytest.raises(openai.BadRequestError, match=f"/v1/{path}: not served here; use /v1/chat/completions"):
        asyncio.run(run())


def test_other_sampling_is_that_of_the_run_and_counted():
    async def run():
        async with serving("ab") as (server, address, engines):
            await ask(address, temperature=0.2, top_p=1.0, frequency_penalty=0)
            return await server.finish(address), engines.requests

    end, [request] = asyncio.run(run())
    assert end.metrics["overridden_sampling"] == 1 and request.sampling.temperature == 1.0


def test_an_answer_is_as_long_as_the_request_and_the_sequence_allow():
    async def run():
        async with serving("ab", "ab", length=60) as (server, address, engines):
            await ask(address, max_tokens=5)
            await ask(address)
            with pytest.raises(openai.BadRequestError) as full:
                await ask(address, messages=[{"role": "user", "content": "in" * 60}])
            return engines.requests, full.value, await server.finish(address)

    (short, long), full, end = asyncio.run(run())
    assert short.sampling.max_new_tokens == 5
    assert long.sampling.max_new_tokens == 60 - len(long.prompt_ids)
    assert full.code == "context_length_exceeded" and end.failure[0] == "context_length_exceeded"


def test_an_answer_ends_before_a_stop_of_the_request():
    async def run():
        async with serving("in abc:", "in?") as (server, address, engines):
            answers = [(await ask(address, stop=stop)).choices[0].message.content for stop in (["c:", "\n\n"], "?")]
            return answers, engines.requests, await server.finish(address)

    answers, (strings, token), end = asyncio.run(run())
    assert answers == ["in ab", "in"] and strings.sampling.stop_strings == ("c:", "\n\n")
    assert token.sampling.stop_token_ids[1:] == tuple(TOKENIZER.encode("?")) and token.sampling.stop_strings == ()
    assert [turn.text for turn in end.trajectory.all_turns] == ["in abc:", "in?"]


def test_a_key_opens_its_session_only_and_says_when_it_ended():
    async def run():
        async with serving("ab", "in") as (server, address, _):
            other = await server.open(replace(spec(TOKENIZER), name="train-0-1"))
            await ask(other)
            server.discard(address, "trajectory_timeout_s")
            with pytest.raises(openai.AuthenticationError, match=r"it ended at [\d:]{8} \(trajectory_timeout_s\)"):
                await ask(address)
            with pytest.raises(openai.AuthenticationError, match="no session has this key"):
                await ask(replace(other, key="sk-guessed"))
            with pytest.raises(GatewayDiedError):
                await server.finish(address)
            return await server.finish(other)

    assert asyncio.run(run()).metrics["requests"] == 1


@pytest.mark.parametrize("lost", [True, False])
def test_a_request_that_is_sent_again_gets_the_first_answer(lost):
    """While the first is answered, or after its connection was lost; not where the answer arrived."""

    async def run():
        async with serving("ab", "in") as (server, address, engines):
            engines.hold.clear()
            first = asyncio.create_task(ask(address))
            while not engines.requests:
                await asyncio.sleep(0.01)
            if lost:
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
            engines.hold.set()
            if not lost:
                await first
            again = await ask(address, extra_headers={"x-stainless-retry-count": "1"})
            return again.choices[0].message.content, await server.finish(address)

    content, end = asyncio.run(run())
    assert content == ("ab" if lost else "in")
    assert end.metrics["retries_joined"] == lost and len(end.trajectory.all_turns) == (1 if lost else 2)


def test_a_call_that_cannot_be_read_is_text_and_counted():
    async def run():
        broken = "<tool_call>{"
        async with serving(broken, call_text("add", {}) + broken) as (server, address, _):
            texts = [(await ask(address, tools=[ADD])).choices[0].message.content for _ in range(2)]
            return texts, await server.finish(address)

    texts, end = asyncio.run(run())
    assert texts == ["<tool_call>{"] * 2 and end.metrics["unread_tool_calls"] == 2


def test_an_answer_that_reaches_its_limit_is_counted():
    async def run():
        async with serving("ab", "ab") as (server, address, _):
            reasons = [(await ask(address, max_tokens=most)).choices[0].finish_reason for most in (1, 3)]
            return reasons, await server.finish(address)

    reasons, end = asyncio.run(run())
    assert reasons == ["length", "stop"] and end.metrics["cut_answers"] == 1


def test_an_engine_that_fails_is_503_and_its_retry_has_the_same_seed():
    async def run():
        async with serving(RuntimeError("engine lost"), "ab") as (server, address, engines):
            with pytest.raises(openai.InternalServerError, match="engine lost") as failed:
                await ask(address)
            await ask(address)
            return failed.value, engines.requests, await server.finish(address)

    failed, (first, second), end = asyncio.run(run())
    assert failed.status_code == 503 and first.seed == second.seed
    assert end.failure[0] == "generation_failed" and len(end.trajectory.turns) == 1


def test_a_session_has_so_many_requests():
    async def run():
        async with serving("ab", max_requests=1) as (server, address, _):
            await ask(address)
            with pytest.raises(openai.BadRequestError, match=r"may send 1 requests \(max_requests\)"):
                await ask(address)
            return await server.finish(address)

    assert asyncio.run(run()).failure[0] == "requests_exhausted"


def test_answers_in_progress_end_with_their_session():
    async def run():
        async with serving("ab") as (server, address, engines):
            engines.hold.clear()
            asked = asyncio.create_task(ask(address))
            while not engines.requests:
                await asyncio.sleep(0.01)
            active = await server.activity.other_than(frozenset())
            end = await server.finish(address)
            with pytest.raises(openai.AuthenticationError):
                await asked
            return active, end, await server.activity.other_than(active)

    active, end, after = asyncio.run(run())
    assert active == {"train:generate"} and after == frozenset()
    assert end.trajectory is None and end.metrics["agent_seconds"] >= 0


def post(address, body: bytes) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {address.key}"}
    request = urllib.request.Request(f"{address.base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_body"),
        (b"[]", 400, "invalid_body"),
        (b"[" * 100_000, 400, "invalid_body"),
        (b'{"messages": [], "extra": ' + b"[" * 70 + b"]" * 70 + b"}", 400, "invalid_body"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_body"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": 5}', 400, "invalid_body"),
        (b'{"messages": [{"role": "user", "content": "a"}], "response_format": "text"}', 400, "invalid_body"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}', 400, "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}', 400, "invalid_value"),
        (b'{"messages": 1}', 400, "invalid_messages"),
        (b'{"messages": [{"role": "user", "content": "a"}], "n": 0}', 400, "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "' + b"a" * MAX_BODY_BYTES + b'"}]}', 413, "request_too_large"),
    ],
)
def test_malformed_bodies_are_errors_in_the_form_of_openai(body, status, code):
    async def run():
        async with serving() as (_, address, _engines):
            return await asyncio.to_thread(post, address, body)

    found, error = asyncio.run(run())
    assert (found, error["error"]["code"]) == (status, code) and error["error"]["message"]


def test_an_empty_result_is_no_answer():
    async def run():
        async def nothing(requests, engine):
            return [GenerateResult(each.request_id, [], [], [], "stop") for each in requests]

        server = GatewayServer(dialogue(TOKENIZER), nothing)
        await server.start()
        try:
            await ask(await server.open(spec(TOKENIZER)))
        finally:
            await server.stop()

    with pytest.raises(openai.InternalServerError, match="without even a stop token"):
        asyncio.run(run())
