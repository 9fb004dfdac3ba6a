"""CORS: which browser pages may call a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from armillary.serving.http.asgi import AsgiConnection, Headers, Send

_METHODS = (b"access-control-allow-methods", b"GET, POST, OPTIONS")
_AGE = (b"access-control-max-age", b"600")
_ALLOWED = b"authorization, content-type, x-api-key, x-request-id"
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, retry-after")
_NAMES = re.compile(rb"[A-Za-z0-9, -]{1,1000}")


class Cors:
    """The origins that are allowed; without any, nothing is added to responses."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = {origin.rstrip("/").encode() for origin in origins}

    def headers_on(self, scope: dict[str, Any], send: Send) -> Send:
        """`send`, which adds the headers for the origin of this request."""
        if not self._origins:
            return send
        headers = self._headers(dict(scope["headers"]).get(b"origin"))
        if not headers:
            return send

        async def add(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        return add

    async def answered_preflight(self, connection: AsgiConnection) -> bool:
        """Answer a browser's question about another request; False for any other request."""
        if not self._origins or connection.method != "OPTIONS":
            return False
        asked = connection.headers.get(b"access-control-request-headers", b"")
        allowed = asked.lower() if _NAMES.fullmatch(asked) else _ALLOWED
        await connection.begin(204, [_METHODS, (b"access-control-allow-headers", allowed), _AGE])
        await connection.end_events()
        return True

    def _headers(self, origin: bytes | None) -> Headers:
        if origin is None or not (self._any or origin in self._origins):
            return []
        allowed = b"*" if self._any else origin
        return [(b"access-control-allow-origin", allowed), (b"vary", b"origin"), _EXPOSED]
