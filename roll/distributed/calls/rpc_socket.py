"""Messages between a process and an actor on the same node, over a Unix socket instead of Ray.

A round trip takes 0.2 ms; two Ray calls, one for the message and one for its answer, take 2 ms on two cores. Ray still
starts the actor, tells where it listens and says how it died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import ray

HEADER = struct.Struct("!Q")
"""The length of a message in bytes, before each message."""

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket, as SO_PEERCRED gives them."""

LOSS_GRACE_S = 10.0
"""How long Ray has to report the death of an actor whose socket has closed."""

logger = logging.getLogger(__name__)


class MessageError(RuntimeError):
    """A message could not be read; the text is the traceback."""


def pickled(message: object) -> bytes:
    """The message as Ray pickles it: with the code of functions and classes that the other process cannot import."""
    data: bytes = ray.cloudpickle.dumps(message)  # type: ignore[no-untyped-call]
    return data


class Connection(asyncio.Protocol):
    """One end of a socket that carries pickled messages in order."""

    def __init__(
        self, received: Callable[[Any], None], unread: Callable[[MessageError], None], lost: Callable[[], object]
    ) -> None:
        """`received` gets each message, `unread` an error for each that cannot be read; `lost` is called at the end."""
        self._received, self._unread, self._lost = received, unread, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other end is there, and belongs to this user."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ends the connection at once if the other end belongs to another user: messages are pickles."""
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(peer)[1] == os.geteuid():
            self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        else:
            cast(asyncio.Transport, transport).abort()

    def data_received(self, data: bytes) -> None:
        """Hands over every message that is complete."""
        if self._transport is None:
            return
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            try:
                self._received(ray.cloudpickle.loads(message))
            except Exception as error:
                self._unread(MessageError("".join(traceback.format_exception(error))))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def send(self, message: object) -> None:
        """Sends a message, or nothing if the connection is lost.

        Raises:
            Exception: the message cannot be pickled.
        """
        data = pickled(message)
        if self._transport is not None:
            self._transport.write(HEADER.pack(len(data)) + data)


class Listener:
    """The actor's side: accepts connections of processes of this user on this node."""

    def __init__(self, connected: Callable[[], Connection]) -> None:
        """`connected` makes the actor's end of a new connection."""
        self._connected = connected
        self._address = f"\0roll-{uuid.uuid4().hex}"  # no file, and no later process has it
        self._server: asyncio.Task[asyncio.Server] | None = None

    async def address(self) -> tuple[str, str]:
        """Id of this node and the socket's address, empty if there can be none; starts to listen at the first call."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = asyncio.create_task(loop.create_unix_server(self._connected, self._address))
        node = ray.get_runtime_context().get_node_id()
        try:
            await self._server
        except OSError as error:
            logger.warning("no socket for messages within the node, so they go through Ray, which is slower: %s", error)
            return node, ""
        return node, self._address


@dataclass(frozen=True)
class SocketLink:
    """A connection to an actor, and what came over it: answers, or in the end an exception that tells why it ended."""

    connection: Connection
    answers: asyncio.Queue[Any]


class ActorTransport:
    """One client's messages to an `RpcActor`: over its socket where both are on one node, else by Ray calls."""

    def __init__(self, actor: Any) -> None:
        """Connects with the first message, and again after a failure."""
        self._actor = actor
        self._linking: asyncio.Task[SocketLink | None] | None = None
        self._collectors = 0

    async def submit(self, client_id: str, calls: list[Any], cancelled: list[int]) -> None:
        """See `RpcActor.submit`. A message does not overtake an earlier one that was awaited.

        Raises:
            ray.exceptions.RayError: the actor died, or its socket was closed.
            Exception: the message cannot be pickled.
        """
        link = await self._link(replace_lost=not self._collectors)
        if link is None:
            await self._ray_call(self._actor.submit.remote(client_id, calls, cancelled))
        elif link.connection.is_open or self._collectors:  # `collect` raises the reason of the loss
            link.connection.send((client_id, calls, cancelled))
        else:
            raise self._closed()

    async def collect(self, client_id: str) -> list[Any]:
        """See `RpcActor.collect`.

        Raises:
            ray.exceptions.RayError: the actor died, or its socket was closed.
            MessageError: a message or an answer could not be read.
        """
        link = await self._link(replace_lost=False)
        if link is None:
            ready: list[Any] = await self._ray_call(self._actor.collect.remote(client_id))
            return ready
        self._collectors += 1
        try:
            answers: list[Any] | Exception = await link.answers.get()
        finally:
            self._collectors -= 1
        if isinstance(answers, Exception):
            link.connection.close()  # its calls end in the actor too
            self._linking = None
            raise answers
        return answers

    async def _ray_call(self, reference: Any) -> Any:
        try:
            return await asyncio.wrap_future(reference.future())
        except ray.exceptions.RayActorError:
            self._linking = None
            raise

    async def _link(self, replace_lost: bool) -> SocketLink | None:
        """The connection; None where messages are Ray calls.

        Args:
            replace_lost: whether one that was lost is replaced: no `collect` waits on it, and Ray may have started the
                actor again.
        """
        known = self._linking
        if known is not None and known.done():
            failed = known.cancelled() or known.exception() is not None
            link = None if failed else known.result()
            if failed or (link is not None and not link.connection.is_open and replace_lost):
                known = None
        if known is None:
            known = self._linking = asyncio.create_task(self._connect())
        return await asyncio.shield(known)

    async def _connect(self) -> SocketLink | None:
        node, address = await asyncio.wrap_future(self._actor.listen.remote().future())
        if not address or node != ray.get_runtime_context().get_node_id():
            return None
        loop = asyncio.get_running_loop()
        answers: asyncio.Queue[Any] = asyncio.Queue()

        def died(death: asyncio.Future[None]) -> None:
            if not death.cancelled():
                answers.put_nowait(death.exception() or self._closed())
                connection.close()

        def lost() -> None:
            loop.call_later(LOSS_GRACE_S, answers.put_nowait, self._closed())

        connection = Connection(answers.put_nowait, answers.put_nowait, lost)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.setblocking(False)
            client.connect(address)  # at once; uvloop's own connect does not know such addresses
            await loop.create_unix_connection(lambda: connection, sock=client)
        except OSError as error:
            client.close()
            logger.warning("messages to an actor on this node go through Ray, which is slower: %s", error)
            return None
        if not connection.is_open:
            return None
        asyncio.wrap_future(self._actor.run_until_death.remote().future()).add_done_callback(died)
        return SocketLink(connection, answers)

    def _closed(self) -> ray.exceptions.ActorUnavailableError:
        text = "its socket was closed, and Ray has not reported its death"
        return ray.exceptions.ActorUnavailableError(text, self._actor._actor_id.binary())
