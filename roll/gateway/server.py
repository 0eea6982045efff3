"""The HTTP server of sessions on aiohttp: keys, retries, streams, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from aiohttp import web

from roll.base.json_values import read_json
from roll.gateway.protocol import NOT_SERVED, ChatRequest, Completions, RequestError, models, read_request
from roll.gateway.session import AgentSession, Dialogue
from roll.rollout.agents.sessions import GatewayDiedError, SessionAddress, SessionEnd, SessionSpec
from roll.rollout.types import GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
"""Largest request: some million tokens."""

ENDED_KEYS = 10_000
"""Keys of sessions that are over for which a message says when they ended."""

FINISHED = "its agent has ended"

Generate = Callable[[Sequence[GenerateRequest], int | None], Awaitable[list[GenerateResult]]]
"""The results of requests, in their order; the engine is one that they prefer."""


class Activity:
    """What is being done at the moment, as names with a count."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._changed = asyncio.Event()

    def add(self, name: str, count: int = 1) -> None:
        """Counts more, or fewer, that do this."""
        before = bool(self._counts[name])
        self._counts[name] += count
        if bool(self._counts[name]) != before:
            self._changed.set()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the block."""
        self.add(name)
        try:
            yield
        finally:
            self.add(name, -1)

    async def other_than(self, known: frozenset[str]) -> frozenset[str]:
        """The names of what is being done, once they are other than `known`."""
        while self.names == known:
            self._changed.clear()
            await self._changed.wait()
        return self.names

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name, count in self._counts.items() if count)


@dataclass(eq=False)
class _Asked:
    """A request that is being answered, or whose answer was not received."""

    digest: bytes
    task: asyncio.Task[Completions]
    http: web.Request | None
    joined: bool = False

    @property
    def lost(self) -> bool:
        return self.http is None or self.http.transport is None or self.http.transport.is_closing()


@dataclass(eq=False)
class _Open:
    """An open session: its requests, and the seconds that each took without generation."""

    session: AgentSession
    asked: list[_Asked] = field(default_factory=list)
    running: int = 0
    seconds: list[float] = field(default_factory=list)
    since: float = 0.0
    agent_seconds: float = 0.0
    cached: int = 0
    prompt_tokens: int = 0
    over: bool = False

    def joinable(self, digest: bytes) -> _Asked | None:
        """The first sending of a request that is sent again; one whose connection is lost before one that is not."""
        found = [each for each in self.asked if each.digest == digest and not each.joined]
        return next((each for each in found if each.lost), found[0] if found else None)


class GatewayServer:
    """Serves the sessions of one process; a `Gateway`."""

    def __init__(self, dialogue: Dialogue, generate: Generate, activity: Activity | None = None) -> None:
        """Binds nothing; `start` does."""
        self._dialogue, self._generate = dialogue, generate
        self.activity = activity or Activity()
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, tuple[float, str]] = {}
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens; port 0 is any free one."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", _not_served)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.base_url = f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Ends all sessions and closes the port."""
        for key in list(self._open):
            self._end(key, "the gateway was closed")
        if self._runner is not None:
            await self._runner.cleanup()

    async def open(self, spec: SessionSpec) -> SessionAddress:
        """A new session."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._open[key] = _Open(AgentSession(spec, self._dialogue), since=time.monotonic())
        self.activity.add(f"{spec.purpose}:env")
        return SessionAddress(self.base_url, key)

    async def finish(self, address: SessionAddress) -> SessionEnd:
        """Ends a session.

        Raises:
            GatewayDiedError: it is over.
        """
        opened = self._end(address.key, FINISHED)
        if opened is None:
            raise GatewayDiedError("the gateway has no session with this key")
        end = opened.session.end()
        end.seconds = opened.seconds
        end.metrics |= {
            "agent_seconds": opened.agent_seconds,
            "prompt_tokens": float(opened.prompt_tokens),
            "cached_tokens": float(opened.cached),
        }
        return end

    def discard(self, address: SessionAddress, why: str) -> None:
        """Ends a session; its key is over for the reason `why`."""
        self._end(address.key, why)

    def close(self) -> None:
        """Ends all sessions; `stop` also closes the port."""
        for key in list(self._open):
            self._end(key, "the gateway was closed")

    def _end(self, key: str, why: str) -> _Open | None:
        opened = self._open.pop(key, None)
        if opened is None:
            return None
        opened.over = True
        for asked in opened.asked:
            asked.task.cancel()
        if not opened.running:
            self._agent_runs(opened, False)
        self._ended[key] = time.time(), why
        if len(self._ended) > ENDED_KEYS:
            del self._ended[next(iter(self._ended))]
        return opened

    def _session(self, http: web.Request) -> _Open:
        key = http.headers.get("Authorization", "").removeprefix("Bearer ").strip() or http.headers.get("api-key", "")
        if key in self._open:
            return self._open[key]
        message = "no session has this key"
        if key in self._ended:
            ended, why = self._ended[key]
            message += f"; it ended at {time.strftime('%H:%M:%S', time.localtime(ended))} ({why})"
        raise RequestError("invalid_api_key", message, 401)

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._session(http)
        return web.json_response(models())

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        opened = self._session(http)
        with self._waiting(opened):
            return await self._answer(opened, http)

    @contextmanager
    def _waiting(self, opened: _Open) -> Iterator[None]:
        """The agent does not run on while a request of it is answered."""
        opened.running += 1
        if opened.running == 1:
            self._agent_runs(opened, False)
        try:
            yield
        finally:
            opened.running -= 1
            if not opened.running and not opened.over:
                self._agent_runs(opened, True)

    def _agent_runs(self, opened: _Open, runs: bool) -> None:
        now = time.monotonic()
        self.activity.add(f"{opened.session.spec.purpose}:env", 1 if runs else -1)
        if not runs:
            opened.agent_seconds += now - opened.since
        opened.since = now

    async def _answer(self, opened: _Open, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        began = time.perf_counter()
        try:
            parsed = read_json(body)
        except ValueError as error:
            raise RequestError("invalid_body", f"the body is no JSON: {error}") from None
        request, digest = read_request(parsed), hashlib.blake2b(body, digest_size=16).digest()
        asked = opened.joinable(digest) if _retries(http) else None
        if asked is None:
            asked = self._ask(opened, request, digest, http)
        else:
            asked.joined, opened.session.joined = True, opened.session.joined + 1
        waited = time.perf_counter()
        try:
            answer = await asyncio.shield(asked.task)
        except asyncio.CancelledError:
            if asked.task.cancelled():
                raise RequestError(
                    "invalid_api_key", "the session ended while this request was answered", 401
                ) from None
            raise
        generated = time.perf_counter()
        sent = await _send(http, request, answer)
        opened.seconds.append(waited - began + time.perf_counter() - generated)
        if sent and asked in opened.asked:
            opened.asked.remove(asked)
        elif not sent:
            asked.http, asked.joined = None, False
        return web.Response() if not sent else sent

    def _ask(self, opened: _Open, request: ChatRequest, digest: bytes, http: web.Request) -> _Asked:
        session = opened.session
        turn = session.ask(request)

        async def sample() -> Completions:
            try:
                with self.activity.measure(f"{session.spec.purpose}:generate"):
                    results = await self._generate(turn.requests, session.spec.engine)
            except Exception as error:
                raise session.failed(turn, f"{type(error).__name__}: {error}") from error
            opened.prompt_tokens += len(turn.prompt) * len(results)
            opened.cached += sum(result.cached_prompt_tokens for result in results)
            return session.answer(turn, results)

        asked = _Asked(digest, asyncio.create_task(sample()), http)
        opened.asked.append(asked)
        asked.task.add_done_callback(lambda done: _drop_failed(opened, asked, done))
        return asked


def _drop_failed(opened: _Open, asked: _Asked, done: asyncio.Task[Completions]) -> None:
    """An answer that failed is not given to a request that is sent again."""
    if (done.cancelled() or done.exception() is not None) and asked in opened.asked:
        opened.asked.remove(asked)


def _retries(http: web.Request) -> bool:
    return http.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


async def _send(http: web.Request, request: ChatRequest, answer: Completions) -> web.StreamResponse | None:
    """Sends an answer; None where the connection is lost."""
    with suppress(ConnectionError):
        if not request.stream:
            whole = web.json_response(answer.body())
            await whole.prepare(http)
            await whole.write_eof()
            return None if http.transport is None else whole
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        for chunk in answer.chunks(request.usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return None if http.transport is None else response
    return None


async def _not_served(http: web.Request) -> web.StreamResponse:
    raise RequestError("not_served", f"{http.path}: {NOT_SERVED}")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPRequestEntityTooLarge:
        large = RequestError("request_too_large", f"the body has more than {MAX_BODY_BYTES} bytes", 413)
        return web.json_response(large.body(), status=413)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        logger.exception("a request failed")
        failed = RequestError("internal_error", f"{type(error).__name__}: {error}", 500)
        return web.json_response(failed.body(), status=500)
