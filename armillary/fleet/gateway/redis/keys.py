"""API keys in Redis, for several gateways: a hash of records by id, and a count of changes that gateways watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from armillary.errors import ArmillaryError, missing
from armillary.fleet.gateway.keys import ApiKey, from_record, id_of, new_key, rotated
from armillary.spec.toml.fields import to_plain
from armillary.store import nan_safe_json

_KEYS, _CHANGES = "armillary:keys", "armillary:keys:changes"
_TIMEOUT_S = 2.0


class RedisKeys:
    """The keys of all gateways on one Redis; only hashes of secrets are stored there, too."""

    is_remote = True

    def __init__(self, url: str) -> None:
        try:
            from redis import Redis
        except ImportError:
            raise missing("redis", "keys shared by several gateways", "gateway") from None
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        parts = urlsplit(url)
        self.place = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"  # without its password

    def close(self) -> None:
        self._redis.close()

    def stamp(self) -> object:
        """Changes with every change of a key; None before the first."""
        return self._ask(lambda: self._redis.get(_CHANGES))

    def read(self) -> dict[str, ApiKey]:
        records = self._ask(lambda: self._redis.hgetall(_KEYS))
        return {key.id: key for record in records.values() for key in [self._key(record)]}

    def add(self, name: str, **fields: object) -> tuple[ApiKey, str]:
        """(record, key): the key itself is shown this once and stored nowhere."""
        key, text = new_key(name, fields)
        self._change(lambda keys: {key.id: key})
        return key, text

    def revoke(self, text: str) -> ApiKey:
        gone: list[ApiKey] = []

        def change(keys: Mapping[str, ApiKey]) -> dict[str, ApiKey | None]:
            gone[:] = [keys[id_of(keys, text)]]
            return {gone[0].id: None}

        self._change(change)
        return gone[0]

    def rotate(self, text: str, overlap_s: float) -> tuple[ApiKey, str]:
        """A new secret; the old one works for `overlap_s` more."""
        result: list[tuple[ApiKey, str]] = []

        def change(keys: Mapping[str, ApiKey]) -> dict[str, ApiKey | None]:
            result[:] = [rotated(keys[id_of(keys, text)], overlap_s)]
            return {result[0][0].id: result[0][0]}

        self._change(change)
        return result[0]

    def _change(self, change: Callable[[Mapping[str, ApiKey]], Mapping[str, ApiKey | None]]) -> None:
        """Apply a change to the keys as they are; again, where somebody else was faster."""

        def transaction(pipe: Any) -> None:
            keys = {key.id: key for record in pipe.hgetall(_KEYS).values() for key in [self._key(record)]}
            changes = change(keys)
            pipe.multi()
            for identity, key in changes.items():
                if key is None:
                    pipe.hdel(_KEYS, identity)
                else:
                    pipe.hset(_KEYS, identity, nan_safe_json.dumps(to_plain(key)))
            pipe.incr(_CHANGES)

        self._ask(lambda: self._redis.transaction(transaction, _KEYS))

    def _key(self, record: bytes) -> ApiKey:
        try:
            return from_record(nan_safe_json.loads(record), self.place)
        except ValueError as error:
            raise ArmillaryError(f"a key in {self.place} is damaged ({error}); delete it from {_KEYS}") from None

    def _ask(self, command: Callable[[], Any]) -> Any:
        from redis.exceptions import RedisError

        try:
            return command()
        except (RedisError, OSError) as error:
            raise ArmillaryError(
                f"Redis at {self.place} does not answer ({type(error).__name__}); start it, or use a file of keys"
            ) from None
