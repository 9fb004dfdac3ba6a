"""API keys of the gateway: hashed at rest, with models, scopes, limits and an expiry each.

A key is `ak-ID-SECRET`. The file has the SHA-256 of each secret, which has 256 random bits, so no slow hash is needed.
A request is looked up by its ID and compared in constant time. The file is read again when it changes, so a revoked
key stops working within a second, without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

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


class KeyFile:
    """The file of keys, for the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, ApiKey]:
        if not self.path.is_file():
            return {}
        table = nan_safe_json.read_table(self.path)
        return {key["id"]: build(ApiKey, key, f"{self.path}:{key['id']}") for key in table.get("keys", ())}

    def add(self, name: str, **fields: object) -> tuple[ApiKey, str]:
        """(record, key): the key itself is shown this once and stored nowhere."""
        secret, identity = new_secret(), secrets.token_hex(4)
        key = build(
            ApiKey,
            {"id": identity, "name": name, "secrets": [{"sha256": hash_of(secret)}], "created": time.time(), **fields},
            "key",
        )
        with locked(self._lock):
            self._write({**self.read(), identity: key})
        return key, f"{_PREFIX}-{identity}-{secret}"

    def revoke(self, text: str) -> ApiKey:
        with locked(self._lock):
            keys = self.read()
            key = keys.pop(self._id_of(keys, text))
            self._write(keys)
        return key

    def rotate(self, text: str, overlap_s: float) -> tuple[ApiKey, str]:
        """A new secret; the old one works for `overlap_s` more."""
        secret, until = new_secret(), time.time() + overlap_s
        with locked(self._lock):
            keys = self.read()
            key = keys[self._id_of(keys, text)]
            old = [
                replace(each, expires=until if each.expires is None else min(each.expires, until))
                for each in key.secrets
                if overlap_s > 0 and (each.expires is None or each.expires > time.time())
            ]
            key = replace(key, secrets=(Secret(sha256=hash_of(secret)), *old))
            self._write({**keys, key.id: key})
        return key, f"{_PREFIX}-{key.id}-{secret}"

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f".{self.path.name}.lock")

    def _id_of(self, keys: Mapping[str, ApiKey], text: str) -> str:
        matches = [key.id for key in keys.values() if text in (key.id, key.name)]
        if len(matches) > 1:
            raise BadInput(f"{len(matches)} keys have the name '{text}'; give the id of one: {', '.join(matches)}")
        if not matches:
            raise unknown("key", text, [*keys, *(key.name for key in keys.values())])
        return matches[0]

    def _write(self, keys: Mapping[str, ApiKey]) -> None:
        old_mask = os.umask(0o077)
        try:
            write_json(self.path, {"keys": [to_plain(key) for key in keys.values()]})
        finally:
            os.umask(old_mask)


class KeyRing:
    """The keys as a running gateway has them."""

    def __init__(self, path: Path, say: Callable[[str], None] = print) -> None:
        self._file, self._keys, self._say = KeyFile(path), dict[str, ApiKey](), say
        self._stamp: tuple[int, int] | None = None
        self._checked_at = 0.0
        self._required = False
        self._reload()

    @property
    def required(self) -> bool:
        """Whether requests need a key: as soon as the file exists, also where its last key was revoked."""
        return self._required

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

    def refresh(self) -> None:
        """Read the file again where it has changed; at most once per second."""
        now = time.monotonic()
        if now - self._checked_at > _CHECK_S:
            self._checked_at = now
            self._reload()

    def _reload(self) -> None:
        try:
            stat = self._file.path.stat()
        except FileNotFoundError:
            self._keys, self._stamp = {}, None
            return
        self._required = True
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp == self._stamp:
            return
        first, self._stamp = self._stamp is None, stamp
        try:
            self._keys = self._file.read()
        except ArmillaryError as error:
            if first:
                raise
            self._say(f"{self._file.path} cannot be read, the keys stay as they were: {one_line(error, 200)}")
