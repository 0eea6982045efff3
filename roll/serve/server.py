"""Tinker's routes over HTTP on aiohttp: the key, errors, and answers that are fetched later."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from hmac import compare_digest

from aiohttp import web
from aiohttp.typedefs import Middleware

from roll.base.json_values import read_json
from roll.serve.requests import Body, required_field
from roll.serve.service import TinkerService
from roll.serve.wire import PROTOBUF, WireError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
"""Largest request; a client sends data in parts of 5 MB."""

LONG_POLL_S = 20.0
"""Longest wait for an answer in one request; the client asks again after 45 s without one."""

CONSTANTS: dict[str, Body] = {
    "client/config": {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False},
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
}
"""Routes with one answer. The flags of the client let the parts of a batch come in their order, over HTTP/1.1."""

NAMED = (
    "create_session session_heartbeat create_model get_info optim_step save_weights load_weights "
    "save_weights_for_sampler create_sampling_session asample"
).split()
"""Routes below /api/v1 that post JSON to the method of `TinkerService` of the same name."""

SERVED = "this server has the routes for training, sampling and saving of a ServiceClient"


class TinkerServer:
    """Serves one `TinkerService`; requests without its key are refused."""

    def __init__(self, service: TinkerService) -> None:
        """Serves nothing; `start` does."""
        self.service, self.key = service, f"tml-{secrets.token_urlsafe(24)}"
        self._runner: web.AppRunner | None = None

    async def start(self, listening: socket.socket) -> str:
        """Serves on a socket, and returns the URL."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guarded(self.key)])
        route = app.router.add_route
        for name in NAMED:
            route("POST", f"/api/v1/{name}", _json(getattr(self.service, name)))
        route("POST", "/api/v1/forward_backward", self._forward_backward)
        route("POST", "/api/v1/retrieve_future", self._retrieve)
        route("POST", "/api/v1/sessions/{id}/finish", self._finish)
        route("GET", "/api/v1/samplers/{id}", self._sampler)
        route("GET", "/api/v1/get_server_capabilities", self._capabilities)
        for path, answer in CONSTANTS.items():
            route("POST", f"/api/v1/{path}", _constant(answer))
        route("GET", "/api/v1/healthz", _constant({"status": "ok"}))
        route("*", "/{path:.*}", _not_served)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        host, port = listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Closes the port and cancels what is being worked on."""
        self.service.futures.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _forward_backward(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(await self.service.forward_backward(await http.read()))

    async def _retrieve(self, http: web.Request) -> web.StreamResponse:
        request_id = required_field(await _body(http), "request_id", str)
        answer = await self.service.futures.fetch(request_id, LONG_POLL_S)
        if answer is None:
            return web.json_response({"type": "try_again", "queue_state": "active"}, status=408)
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type=PROTOBUF)
        return web.json_response(answer)

    async def _finish(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(await self.service.finish_session(http.match_info["id"]))

    async def _sampler(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(await self.service.get_sampler(http.match_info["id"]))

    async def _capabilities(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(await self.service.capabilities())


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _guarded(key: str) -> Middleware:
    """Refuses other keys; a request that cannot be served has status 400, which the client does not repeat."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not compare_digest(request.headers.get("X-API-Key", "").encode(), key.encode()):
            return web.json_response({"error": "X-API-Key: is not the key that roll serve printed"}, status=401)
        try:
            return await handler(request)
        except WireError as error:
            return web.json_response({"error": str(error)}, status=400)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            logger.exception("a request could not be read")
            what = f"body: {type(error).__name__}: {error}; send a request of the SDK"
            return web.json_response({"error": what}, status=400)

    return guard


async def _body(http: web.Request) -> Body:
    try:
        body = read_json(await http.read())
    except ValueError as error:
        raise WireError(f"body: is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError("body: is no JSON object")
    return body


def _json(method: Callable[[Body], Awaitable[Body]]) -> Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        return web.json_response(await method(await _body(http)))

    return handle


def _constant(answer: Body) -> Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        return web.json_response(answer)

    return handle


async def _not_served(http: web.Request) -> web.StreamResponse:
    return web.json_response({"error": f"{http.path}: is not served; {SERVED}"}, status=404)
