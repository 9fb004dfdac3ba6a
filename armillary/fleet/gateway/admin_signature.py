"""Signed calls of the admin API: who calls is proved by an Ed25519 signature, and no call can be sent twice.

    authorization: Ed25519 TIME.NONCE.SIGNATURE

The signature covers method, host, path, time, nonce and body. A call is valid for a minute around its time, and its
nonce once: in this gateway, or with Redis in all of them. No secret is sent, so none can be taken from a log.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from armillary.errors import ArmillaryError, BadInput, missing
from armillary.fleet.gateway.redis.limits import redis_errors
from armillary.serving.http.asgi import AsgiConnection
from armillary.serving.http.problem import Problem
from armillary.store import ed25519

VALID_S = 60.0
_SCHEME = "Ed25519 "
_TIMEOUT_S = 30.0


def signed_header(method: str, host: str, path: str, body: bytes, key: Path) -> str:
    """The authorization header of a call."""
    at, nonce = f"{time.time():.3f}", secrets.token_hex(16)
    text = _message(method, host, path, at, nonce, body)
    return f"{_SCHEME}{at.replace('.', '_')}.{nonce}.{ed25519.signature_of(text, ed25519.private_key(key))}"


def _message(method: str, host: str, path: str, at: str, nonce: str, body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return "\n".join(("armillary gateway admin", method, host, path, at, nonce, digest)).encode()


class NonceStore(Protocol):
    """Remembers nonces for as long as their calls are valid."""

    async def is_new(self, nonce: str) -> bool: ...

    async def close(self) -> None: ...


class LocalNonces:
    """In the memory of this process; calls signed before it started are refused, as it may have forgotten them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._seen = clock, dict[str, float]()

    async def is_new(self, nonce: str) -> bool:
        now = self._clock()
        self._seen = {each: until for each, until in self._seen.items() if until > now}
        if nonce in self._seen:
            return False
        self._seen[nonce] = now + 2 * VALID_S
        return True

    async def close(self) -> None:
        self._seen.clear()


class RedisNonces:
    """In Redis, for several gateways."""

    def __init__(self, url: str) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError:
            raise missing("redis", "an admin API of several gateways", "gateway") from None
        self._redis: Any = Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)

    async def is_new(self, nonce: str) -> bool:
        try:
            return bool(await self._redis.set(f"armillary:nonce:{nonce}", 1, nx=True, ex=int(2 * VALID_S)))
        except redis_errors():
            raise Problem(503, "Redis does not answer, so no call can be checked; try again later") from None

    async def close(self) -> None:
        await self._redis.aclose()


class AdminGuard:
    """Checks calls against the public keys that are trusted."""

    def __init__(self, trusted: Sequence[str], nonces: NonceStore, clock: Callable[[], float] = time.time) -> None:
        self._trusted, self._nonces, self._clock = tuple(trusted), nonces, clock
        self._not_before = clock() if isinstance(nonces, LocalNonces) else 0.0

    async def close(self) -> None:
        await self._nonces.close()

    async def check(self, connection: AsgiConnection, body: bytes) -> None:
        """Problem 401 where a call is not signed by a trusted key, is too old, or was made before."""
        given = connection.headers.get(b"authorization", b"").decode("latin-1")
        parts = given.removeprefix(_SCHEME).split(".")
        if not given.startswith(_SCHEME) or len(parts) != 3 or not self._trusted:
            raise _refused("the call is not signed")
        at, nonce, signature = parts[0].replace("_", "."), parts[1], parts[2]
        host = connection.headers.get(b"host", b"").decode("latin-1")
        text = _message(connection.method, host, connection.path, at, nonce, body)
        if not any([ed25519.is_signed(text, signature, key) for key in self._trusted]):
            raise _refused("the signature is not that of a trusted key over this call")
        signed_at = float(at)  # signed, so it is a number
        if abs(self._clock() - signed_at) > VALID_S or signed_at < self._not_before - 1.0:
            raise _refused("the call was signed too long ago, or the clocks differ")
        if not await self._nonces.is_new(nonce):
            raise _refused("this call was made before")


def _refused(reason: str) -> Problem:
    return Problem(401, f"{reason}; sign a new one with armillary gateway admin", code="invalid_signature")


# --- the client's side


def call_admin(url: str, method: str, path: str, body: bytes, key: Path) -> Any:
    """The JSON of the answer; ArmillaryError with the gateway's own message where it refuses."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadInput(f"'{url}' is not an address; write it like http://127.0.0.1:9000")
    request = Request(url.rstrip("/") + path, data=body or None, method=method)
    request.add_header("host", parts.netloc)
    request.add_header("content-type", "application/json")
    request.add_header("authorization", signed_header(method, parts.netloc, path, body, key))
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except HTTPError as error:
        raise ArmillaryError(_reason(error)) from None
    except (URLError, TimeoutError, ValueError) as error:
        raise ArmillaryError(f"{url} does not answer ({error}); check the address of the gateway") from None


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the gateway answered {error.code}; check its address and log"
