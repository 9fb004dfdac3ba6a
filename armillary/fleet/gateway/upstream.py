"""HTTP/1.1 to a replica: kept connections, responses part by part, deadlines without a timer per request.

Written on asyncio's transports and httptools because a general client costs more than everything else the gateway does.
Redirects are not followed, and only addresses of the configuration are called.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import httptools

_IDLE_S = 15.0
"""a connection unused for this long is closed: servers close theirs after 60 to 75 s"""
_HIGH_WATER = 256 * 1024
"""bytes of a response that wait for a slow client before the replica is made to wait"""
_SWEEP_S = 0.2
_MAX_HEAD = 65_536


EVENT_STREAM = b"text/event-stream"


class UpstreamError(Exception):
    """A replica that cannot be reached, closed the connection, was too slow or sent something else than HTTP."""

    def __init__(self, reason: str, *, reused: bool = False) -> None:
        super().__init__(reason)
        self.reused = reused  # an idle connection that the server had closed: says nothing about the replica


class UpstreamConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self.used = 0
        self.idle_since = self.sent_at = 0.0
        self.deadline: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self.is_stream, self.chunks = False, 0
        self._has_head = self._complete = self._keep_alive = self._paused = False
        self._parts: deque[bytes] = deque()
        self._size = self._head_bytes = 0

    # --- for the proxy

    def send(self, request: bytes) -> None:
        """Write a complete request."""
        if self.used:
            self._clear()
        self.used += 1
        self.sent_at = self._pool.clock()
        self._transport.write(request)

    async def head(self, timeout_s: float) -> int:
        """The status, once the head of the response has arrived."""
        while not self._has_head:
            await self._wait(timeout_s)
        return self.status

    async def read(self, timeout_s: float) -> bytes:
        """The next bytes of the body; empty at its end."""
        while not self._parts:
            if self._complete:
                return b""
            await self._wait(timeout_s)
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def awaits_chunk(self) -> bool:
        """Whether it is a stream that has begun, and the gateway waits for its next part: not for a slow client."""
        return self.is_stream and self.chunks > 0 and self.deadline is not None and not self._complete

    def release(self) -> None:
        """Keep the connection for another request where its response is complete, else close it."""
        if self._complete and self._keep_alive and self._error is None and not self._parts:
            self._pool.give_back(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str, *, reused: bool = False) -> None:
        """End the request with an error."""
        if self._error is None:
            self._error = UpstreamError(reason, reused=reused)
        self._wake()

    async def _wait(self, timeout_s: float) -> None:
        """Until something has arrived; the deadline counts only while somebody waits."""
        if self._error is not None:
            raise self._error
        self.deadline = self._pool.clock() + timeout_s
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self.deadline = None
        if self._error is not None and not self._parts and not self._complete:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- asyncio's protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._pool.heard_at = self._pool.clock()
        if self._complete or not self.used:  # nobody asked: what follows could be taken for another answer
            return self.abort()
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD + len(data):
                self.fail("it sent a response head that is too large")
                return self.abort()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"it sent no valid HTTP ({type(error).__name__})")
            return self.abort()
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()
        return None

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        if self._has_head and not self._complete and self._until_close():
            self._complete = True
        if not self._complete:
            self.fail("it closed the connection", reused=self.used > 1 and self._head_bytes == 0)
        self._wake()

    def _until_close(self) -> bool:
        """Whether the end of the connection is the end of the body: neither length nor chunks were announced."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # --- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:  # a second response in the same bytes
            self._keep_alive = False
            return
        if self._parser.get_status_code() < 200:  # 100 Continue and its like
            self.headers.clear()
            return
        self.status, self._has_head = self._parser.get_status_code(), True
        self.is_stream = any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in self.headers)
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        self._parts.append(data)
        self._size += len(data)
        self.chunks += 1
        if self.is_stream:
            self._pool.stream_chunks += 1

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete = True


class ReplicaPool:
    """The connections to one replica."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "settings check the address"
        self.host, self.tls = parts.hostname, parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.base_path = parts.path.rstrip("/")
        self.authority = parts.netloc.encode()
        self.clock = time.monotonic
        self.heard_at = 0.0  # when the replica last sent something
        self.stream_chunks = 0  # parts of streams that it has sent
        self._timeout_s = connect_timeout_s
        self._idle: list[UpstreamConnection] = []
        self._all: set[UpstreamConnection] = set()
        self._context = ssl.create_default_context() if self.tls else None

    async def connect(self) -> UpstreamConnection:
        """A connection that is ready for a request."""
        while self._idle:
            connection = self._idle.pop()
            if self.clock() - connection.idle_since < _IDLE_S:
                return connection
            connection.abort()
        return await self.connect_new()

    async def connect_new(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self.port, ssl=self._context
                )
        except TimeoutError:
            raise UpstreamError(f"it did not accept a connection within {self._timeout_s:g} s") from None
        except OSError as error:
            raise UpstreamError(f"it cannot be reached ({error.strerror or type(error).__name__})") from None
        self._all.add(connection)
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        connection.idle_since = self.clock()
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def check_deadlines(self) -> None:
        """Fail every request whose deadline has passed."""
        now = self.clock()
        for connection in list(self._all):
            if connection.deadline is not None and now > connection.deadline:
                connection.fail("it was silent for too long")

    def open_streams(self) -> list[UpstreamConnection]:
        """Streams that have begun and whose next part is awaited."""
        return [connection for connection in self._all if connection.awaits_chunk]

    def fail_unanswered(self, reason: str, sent_before: float = math.inf) -> None:
        """End the requests without a part of their answer, so that they are sent to another replica. A head alone is
        none: some servers send it before they begin."""
        for connection in list(self._all):
            if connection.deadline is not None and not connection.chunks and connection.sent_at < sent_before:
                connection.fail(reason)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()


async def sweep(pools: Callable[[], Iterable[ReplicaPool]]) -> None:
    """Check deadlines of the present replicas until cancelled."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        for pool in pools():
            pool.check_deadlines()
