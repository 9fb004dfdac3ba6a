"""Closes idle connections: those that send no complete request head, and clients that do not read their response."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

_SWEEP_INTERVAL_S = 1.0
SILENT_S = 15.0
"""time limit for a complete request head"""
STUCK_S = 30.0
"""time limit for a client that leaves a full send buffer unread"""
HEAD_BYTES = 65_536
"""size limit of a request head, plus at most one read"""


async def sweep(server: uvicorn.Server) -> None:
    """Check all connections once per second until cancelled."""
    raise_file_limit()
    since: dict[Any, tuple[str, float]] = {}
    while True:
        await asyncio.sleep(_SWEEP_INTERVAL_S)
        now, seen = time.monotonic(), dict[Any, tuple[str, float]]()
        for connection in list(server.server_state.connections):
            stall = stall_of(connection)
            if stall is None:
                continue
            kind, began = since.get(connection, (stall, now))
            seen[connection] = (stall, began if kind == stall else now)
            if now - seen[connection][1] > (STUCK_S if stall == "stuck" else SILENT_S):
                connection.transport.abort()
        since = seen


def stall_of(connection: Any) -> str | None:
    """stuck: the response is not read; silent: the head of the first or next request is not complete."""
    if connection.flow is not None and connection.flow.write_paused:
        return "stuck"
    cycle = connection.cycle
    if cycle is None:
        return "silent"
    # uvicorn's own timer covers idle connections only: the first byte of a request stops it
    return "silent" if cycle.response_complete and connection.timeout_keep_alive_task is None else None


def protocol() -> Any:
    """uvicorn's httptools parser with a limit of the request head, which it lacks; h11 has its own."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:
        return "h11"

    class BoundedHead(HttpToolsProtocol):  # type: ignore[misc]
        """Counts the bytes received since the last complete head or body part."""

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

    return BoundedHead


def raise_file_limit() -> None:
    """Raise the limit of open files, and so of connections, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
