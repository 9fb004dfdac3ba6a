"""API keys of the gateway: hashed at rest, with models, scopes, limits and an expiry each.

A key is `ak-ID-SECRET`. The file has the SHA-256 of each secret, which has 256 random bits, so no slow hash is needed.
A request is looked up by its ID and compared in constant time. The file is read again when it changes, so a revoked
key stops working within a second, without a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from armillary.errors import ArmillaryError, BadInput, one_line, unknown
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json
from armillary.store.lock import locked

Scope = Literal["inference", "metrics"]
_PREFIX = "ak"
_ABSENT = hashlib.sha256(b"no such key").hexdigest()
_CHECK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Secret:
    """The hash of a secret, valid until `expires` (unix seconds; none: as long as the key)."""

    sha256: str
    expires: float | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most requests and tokens in any window of `window_s` seconds, per model; none: no limit."""

    requests: int | None = None
    tokens: int | None = None
    window_s: float = 60.0

    @property
    def is_set(self) -> bool:
        return self.requests is not None or self.tokens is not None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Most tokens and dollars in a calendar day or month (UTC), of all models together; none: no budget."""

    tokens: int | None = None
    usd: float | None = None
    period: Literal["day", "month"] = "month"

    def __post_init__(self) -> None:
        if (self.tokens is not None and self.tokens < 1) or (self.usd is not None and not self.usd > 0):
            raise BadInput("a budget is above 0; revoke the key to stop a client")

    @property
    def is_set(self) -> bool:
        return self.tokens is not None or self.usd is not None


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """One key of one client."""

    id: str
    name: str  # of the client, for people
    secrets: tuple[Secret, ...]
    created: float
    expires: float | None = None
    models: tuple[str, ...] = ()  # empty: all
    scopes: tuple[Scope, ...] = ("inference",)
    limits: Limits = Limits()
    model_limits: Mapping[str, Limits] = field(default_factory=dict)  # instead of `limits`
    budget: Budget = Budget()
    priority: int = 0  # as vLLM's: lower is served earlier while requests wait
    weight: float = 1.0  # of its share, while requests of several keys wait

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1e6:
            raise BadInput(f"weight {self.weight} of {self.name} is no share; give a number above 0")

    def is_valid(self, now: float) -> bool:
        return self.expires is None or now < self.expires

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models

    def limits_of(self, model: str) -> Limits:
        return self.model_limits.get(model, self.limits)


def new_secret() -> str:
    return secrets.token_urlsafe(32)


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def new_key(name: str, fields: Mapping[str, object]) -> tuple[ApiKey, str]:
    """(record, key) of a new client; the key itself is stored nowhere."""
    secret, identity = new_secret(), secrets.token_hex(4)
    known = {"id": identity, "name": name, "secrets": [{"sha256": hash_of(secret)}], "created": time.time()}
    return build(ApiKey, {**known, **fields}, "key"), f"{_PREFIX}-{identity}-{secret}"


def rotated(key: ApiKey, overlap_s: float) -> tuple[ApiKey, str]:
    """(record, key) with a new secret; the old one works for `overlap_s` more."""
    secret, now = new_secret(), time.time()
    until = now + overlap_s
    old = [
        replace(each, expires=until if each.expires is None else min(each.expires, until))
        for each in key.secrets
        if overlap_s > 0 and (each.expires is None or each.expires > now)
    ]
    key = replace(key, secrets=(Secret(sha256=hash_of(secret)), *old))
    return key, f"{_PREFIX}-{key.id}-{secret}"


def id_of(keys: Mapping[str, ApiKey], text: str) -> str:
    """The id of the key that an id or a client's name stands for."""
    matches = [key.id for key in keys.values() if text in (key.id, key.name)]
    if len(matches) > 1:
        raise BadInput(f"{len(matches)} keys have the name '{text}'; give the id of one: {', '.join(matches)}")
    if not matches:
        raise unknown("key", text, [*keys, *(key.name for key in keys.values())])
    return matches[0]


def from_record(record: Mapping[str, Any], place: str) -> ApiKey:
    return build(ApiKey, dict(record), f"{place}:{record.get('id')}")


class KeyStore(Protocol):
    """Where keys are: a file, or Redis."""

    place: str
    is_remote: bool

    def stamp(self) -> object:
        """Changes with every change of a key; None before the first."""

    def read(self) -> dict[str, ApiKey]: ...

    def add(self, name: str, **fields: object) -> tuple[ApiKey, str]: ...

    def revoke(self, text: str) -> ApiKey: ...

    def rotate(self, text: str, overlap_s: float) -> tuple[ApiKey, str]: ...


class KeyFile:
    """Keys in a file."""

    is_remote = False

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)

    def stamp(self) -> object:
        """Changes with every change of a key; None before the first."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def read(self) -> dict[str, ApiKey]:
        if not self.path.is_file():
            return {}
        table = nan_safe_json.read_table(self.path)
        return {key["id"]: from_record(key, self.place) for key in table.get("keys", ())}

    def add(self, name: str, **fields: object) -> tuple[ApiKey, str]:
        """(record, key): the key itself is shown this once and stored nowhere."""
        key, text = new_key(name, fields)
        with locked(self._lock):
            self._write({**self.read(), key.id: key})
        return key, text

    def revoke(self, text: str) -> ApiKey:
        with locked(self._lock):
            keys = self.read()
            key = keys.pop(id_of(keys, text))
            self._write(keys)
        return key

    def rotate(self, text: str, overlap_s: float) -> tuple[ApiKey, str]:
        """A new secret; the old one works for `overlap_s` more."""
        with locked(self._lock):
            keys = self.read()
            key, secret = rotated(keys[id_of(keys, text)], overlap_s)
            self._write({**keys, key.id: key})
        return key, secret

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    def _write(self, keys: Mapping[str, ApiKey]) -> None:
        old_mask = os.umask(0o077)
        try:
            write_json(self.path, {"keys": [to_plain(key) for key in keys.values()]})
        finally:
            os.umask(old_mask)


class KeyRing:
    """The keys as a running gateway has them."""

    def __init__(self, store: KeyStore, say: Callable[[str], None] = print) -> None:
        self._store, self._keys, self._say = store, dict[str, ApiKey](), say
        self._stamp: object = None
        self._checked_at = 0.0
        self._required = self._failed = False
        self._reload()

    @property
    def required(self) -> bool:
        """Whether requests need a key: as soon as the file exists, also where its last key was revoked, and always
        with Redis, which may have lost them."""
        return self._required or self._store.is_remote

    def find(self, given: bytes) -> ApiKey | None:
        """The valid key that a client sent; the comparison takes as long for an unknown id as for a wrong secret."""
        now = time.time()
        prefix, _, rest = given.partition(b"-")
        identity, _, secret = rest.partition(b"-")
        key = self._keys.get(identity.decode("ascii", "replace"))
        digest = hashlib.sha256(secret).hexdigest()
        known = key.secrets if key is not None and prefix == _PREFIX.encode() else (Secret(sha256=_ABSENT),)
        matches = [
            hmac.compare_digest(digest, each.sha256) and (each.expires is None or now < each.expires) for each in known
        ]
        return key if any(matches) and key is not None and key.is_valid(now) else None

    def all(self) -> Mapping[str, ApiKey]:
        return self._keys

    def refresh(self) -> None:
        """Read a file again where it has changed; at most once per second. Keys in Redis are read by `watch`."""
        now = time.monotonic()
        if now - self._checked_at > _CHECK_S and not self._store.is_remote:
            self._checked_at = now
            self._reload_or_say()

    async def watch(self) -> None:
        """Follow keys that are not on this machine until cancelled, without delaying requests."""
        while self._store.is_remote:
            await asyncio.sleep(_CHECK_S)
            await asyncio.to_thread(self._reload_or_say)

    def _reload_or_say(self) -> None:
        """Where the keys cannot be read they stay as they were, and the log says so once."""
        try:
            self._reload()
            self._failed = False
        except ArmillaryError as error:
            if not self._failed:
                self._say(f"the keys stay as they were: {one_line(error, 200)}")
            self._failed = True

    def _reload(self) -> None:
        stamp = self._store.stamp()
        if stamp is None:  # nothing there, or no more: keys are still required where there were any
            self._keys, self._stamp = {}, None
        elif stamp != self._stamp:
            self._required = True
            self._keys = self._store.read()
            self._stamp = stamp
