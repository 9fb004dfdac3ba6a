"""Connections that only cost: ones that never ask anything, and clients that do not read their answers, are closed."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

_EVERY_S = 1.0
SILENT_S = 15.0
"""a connection may take so long to bring a whole head of a request"""
STUCK_S = 30.0
"""a client may leave a full buffer unread for so long"""
HEAD_BYTES = 65_536
"""a request's head at most, give or take what is read at a time"""


async def sweep(server: uvicorn.Server) -> None:
    """Look at all connections now and then, until cancelled."""
    raise_file_limit()
    since: dict[Any, tuple[str, float]] = {}
    while True:
        await asyncio.sleep(_EVERY_S)
        now, seen = time.monotonic(), dict[Any, tuple[str, float]]()
        for connection in list(server.server_state.connections):
            trouble = trouble_of(connection)
            if trouble is None:
                continue
            kind, began = since.get(connection, (trouble, now))
            seen[connection] = (trouble, began if kind == trouble else now)
            if now - seen[connection][1] > (STUCK_S if trouble == "stuck" else SILENT_S):
                connection.transport.abort()
        since = seen


def trouble_of(connection: Any) -> str | None:
    """stuck: its answer is not read; silent: the head of its first or next request does not come to an end."""
    if connection.flow is not None and connection.flow.write_paused:
        return "stuck"
    cycle = connection.cycle
    if cycle is None:
        return "silent"
    # uvicorn's own timer is for connections at rest, and the first byte of a request ends it
    return "silent" if cycle.response_complete and connection.timeout_keep_alive_task is None else None


def protocol() -> Any:
    """uvicorn's quick HTTP parser, which sets heads of requests no limit, with one; the plain one has its own."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:
        return "h11"

    class Bounded(HttpToolsProtocol):  # type: ignore[misc]
        """Counts what comes and is neither a whole head nor part of a body."""

        head_bytes = 0

        def data_received(self, data: bytes) -> None:
            if self.head_bytes > HEAD_BYTES:
                self.transport.abort()
                return
            self.head_bytes += len(data)
            super().data_received(data)

        def on_headers_complete(self) -> None:
            self.head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self.head_bytes = 0
            super().on_body(body)

    return Bounded


def raise_file_limit() -> None:
    """As many open connections as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
