"""What a server does around its routes: request ids, CORS, a path that a proxy adds, and an access log.

The access log has one JSON line per request (time, id, client, method, path, status, seconds), without query strings,
bodies and keys.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from armillary.serving.http.asgi import AsgiConnection, Receive, Send
from armillary.serving.http.cors import Cors
from armillary.serving.http.json_log import JsonLog
from armillary.serving.http.request_id import HEADER, request_id_of
from armillary.serving.http.server import ListenOptions, Say


class Front:
    """An ASGI application around another."""

    def __init__(self, app: Any, listen: ListenOptions, say: Say) -> None:
        self._app, self._root_path, self._say = app, listen.root_path.rstrip("/"), say
        self._cors = Cors(listen.cors_origins)
        self._log = JsonLog(listen.access_log) if listen.access_log is not None else None
        self._writer: asyncio.Task[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begin, status = {name.lower(): value for name, value in scope["headers"]}, time.monotonic(), 0
        request_id = request_id_of(headers)
        scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        send = self._cors.headers_on(scope, send)

        async def tagged(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (HEADER, request_id.encode())]}
            await send(message)

        try:
            if not await self._cors.answered_preflight(AsgiConnection(scope, receive, tagged)):
                await self._app(scope, receive, tagged)
        finally:
            if self._log is not None:
                self._add(self._log, scope, request_id, status, time.monotonic() - begin)

    def _add(self, log: JsonLog, scope: dict[str, Any], request_id: str, status: int, seconds: float) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(log.run(self._say))
        client = scope.get("client")
        log.add(
            request=request_id,
            client=client[0] if client else None,
            method=scope["method"],
            path=scope["path"][:200],
            status=status or 499,  # nginx's code for a client that closed the connection
            seconds=round(seconds, 4),
        )

    def close(self) -> None:
        """Write the last lines."""
        if self._log is not None:
            self._log.close()
