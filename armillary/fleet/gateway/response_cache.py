"""Responses kept for equal requests of the same client: exact matches only, for a time, within a number of bytes.

Only requests whose answer does not depend on chance are kept: temperature 0, or no sampling at all, as embeddings. A
stream is kept as its parts and replayed as a stream. Clients never get each other's entries: whether something was
asked before is private, too.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from armillary.fleet.gateway.body import RequestBody

_WITHOUT_SAMPLING = ("/v1/embeddings", "/v1/rerank", "/v1/score")
_OVERHEAD = 500
"""bytes of an entry beside its content"""
_LARGEST = 1_000_000
_ENDS = (b"data: [DONE]", b'"message_stop"', b'"response.completed"')
_ERRORS = (b'data: {"error"', b"event: error", b'"type":"error"')


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A complete response."""

    content_type: bytes
    parts: tuple[bytes, ...]
    stream: bool

    @property
    def bytes(self) -> int:
        return sum(map(len, self.parts)) + _OVERHEAD


class ResponseRecorder:
    """Collects the parts of a response as they pass; gives up where they are too many."""

    def __init__(self, content_type: bytes, *, stream: bool) -> None:
        self._content_type, self._stream = content_type, stream
        self._parts: list[bytes] | None = []
        self._size = 0

    def add(self, part: bytes) -> None:
        if self._parts is None or not part:
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > _LARGEST:
            self._parts = None

    def response(self) -> CachedResponse | None:
        """None where it was too large, or where a stream ended with an error."""
        if self._parts is None or (self._stream and not _is_complete(b"".join(self._parts))):
            return None
        return CachedResponse(self._content_type, tuple(self._parts), self._stream)


class ResponseCache:
    """Entries by a hash of client and request; the longest unused are dropped first."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._entries: OrderedDict[bytes, tuple[float, CachedResponse]] = OrderedDict()
        self.bytes = self.hits = self.misses = 0

    def key(self, tenant: str, body: RequestBody, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The key of a request; None where its response must not be kept."""
        if not _is_deterministic(body) or b"no-" in headers.get(b"cache-control", b""):
            return None
        text = msgspec.json.encode([tenant, body.path, body.table], order="sorted")
        return hashlib.sha256(text).digest()

    def get(self, key: bytes) -> CachedResponse | None:
        ends_at, response = self._entries.get(key, (0.0, None))
        if response is None or self._clock() >= ends_at:
            self.misses += 1
            if response is not None:
                self._drop(key)
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return response

    def put(self, key: bytes, response: CachedResponse, ttl_s: float) -> None:
        self._drop(key)
        self._entries[key] = (self._clock() + ttl_s, response)
        self.bytes += response.bytes
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[1].bytes


def _is_deterministic(body: RequestBody) -> bool:
    if body.path in _WITHOUT_SAMPLING or not body.uses_model:
        return True
    temperature = body.table.get("temperature")
    return isinstance(temperature, int | float) and temperature == 0 and body.choices == 1


def _is_complete(stream: bytes) -> bool:
    """Whether a stream came to its proper end; in the text of an answer quotes are escaped."""
    return any(mark in stream for mark in _ENDS) and not any(mark in stream for mark in _ERRORS)
