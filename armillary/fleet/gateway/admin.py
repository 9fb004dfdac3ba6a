"""The admin API of a running gateway: keys, budgets, usage and replicas, for signed calls.

GET    /admin/keys               DELETE /admin/keys/ID            POST /admin/keys           {"name": …}
POST   /admin/keys/ID/rotate     {"overlap_s": 3600}
GET    /admin/usage              GET    /admin/replicas
POST   /admin/replicas/drain     {"url": …}                       POST /admin/replicas/resume {"url": …}
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from armillary.errors import ArmillaryError
from armillary.fleet.gateway.admin_signature import AdminGuard
from armillary.fleet.gateway.gateway_metrics import GatewayMetrics
from armillary.fleet.gateway.keys import ApiKey, KeyStore
from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.routing import Replica
from armillary.serving.http.asgi import AsgiConnection, BodyLimits
from armillary.serving.http.problem import Problem, bad_request
from armillary.spec.toml.fields import to_plain

PREFIX = "/admin/"
_FIELDS = ("models", "scopes", "limits", "model_limits", "budget", "priority", "weight", "expires")
_BODY = BodyLimits(limit=100_000, total=10_000_000, timeout_s=10.0)


class AdminApi:
    """Answers calls under /admin/."""

    def __init__(self, guard: AdminGuard, keys: KeyStore, models: Models, metrics: GatewayMetrics) -> None:
        self._guard, self._keys, self._models, self._metrics = guard, keys, models, metrics

    async def close(self) -> None:
        await self._guard.close()

    async def answer(self, connection: AsgiConnection) -> None:
        body = await connection.body(_BODY)
        await self._guard.check(connection, body)
        call = self._call(connection.method, connection.path.removeprefix(PREFIX).split("/"), _table(body))
        try:
            await connection.json(200, await asyncio.to_thread(call))
        except ArmillaryError as error:
            raise bad_request(str(error)) from None

    def _call(self, method: str, words: list[str], body: dict[str, Any]) -> Callable[[], Any]:
        match method, words:
            case "GET", ["keys"]:
                return self._list_keys
            case "POST", ["keys"]:
                return partial(self._add_key, body)
            case "DELETE", ["keys", identity]:
                return lambda: {"revoked": self._keys.revoke(identity).id}
            case "POST", ["keys", identity, "rotate"]:
                return partial(self._rotate_key, identity, body)
            case "GET", ["usage"]:
                return self._usage
            case "GET", ["replicas"]:
                return self._list_replicas
            case "POST", ["replicas", "drain" | "resume" as what]:
                return partial(self._drain, body, drained=what == "drain")
        raise Problem(404, "no such call; docs/gateway.md lists those of the admin API", code="no_route")

    def _list_keys(self) -> dict[str, Any]:
        return {"keys": [_shown(key) for key in self._keys.read().values()]}

    def _add_key(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.pop("name", None)
        if not isinstance(name, str) or not name:
            raise bad_request('a key needs the name of its client; add "name"', "name")
        if unknown := [field for field in body if field not in _FIELDS]:
            raise bad_request(f"unknown field {unknown[0]}; a key has {', '.join(_FIELDS)}", unknown[0])
        key, secret = self._keys.add(name, **body)
        return {"key": secret, **_shown(key)}

    def _rotate_key(self, identity: str, body: dict[str, Any]) -> dict[str, Any]:
        overlap_s = body.get("overlap_s", 3600.0)
        if not isinstance(overlap_s, int | float) or overlap_s < 0:
            raise bad_request("overlap_s is a number of seconds; correct it", "overlap_s")
        key, secret = self._keys.rotate(identity, float(overlap_s))
        return {"key": secret, **_shown(key)}

    def _usage(self) -> dict[str, Any]:
        """Since this gateway started; the audit log has the rest."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for (client, model, kind), count in self._metrics.tokens.items():
            rows.setdefault((client, model), {})[f"{kind}_tokens"] = count
        for pair, usd in self._metrics.usd.items():
            rows.setdefault(pair, {})["usd"] = usd
        return {"usage": [{"client": client, "model": model, **row} for (client, model), row in rows.items()]}

    def _list_replicas(self) -> dict[str, Any]:
        return {"replicas": [_replica(model.name, replica) for model, replica in self._models.replicas()]}

    def _drain(self, body: dict[str, Any], *, drained: bool) -> dict[str, Any]:
        """Take a replica out of the rotation, or back; its requests finish."""
        matches = [pair for pair in self._models.replicas() if pair[1].link.settings.url == body.get("url")]
        if not matches:
            raise bad_request("no replica has this url; GET /admin/replicas lists them", "url")
        for _, replica in matches:
            replica.drained = drained
        return {"replicas": [_replica(model.name, replica) for model, replica in matches]}


def _table(body: bytes) -> dict[str, Any]:
    try:
        table = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise bad_request("the body is not a JSON object; correct it")
    return table


def _shown(key: ApiKey) -> Mapping[str, Any]:
    """A key without its hashes."""
    return {**to_plain(key), "secrets": len(key.secrets), "valid": key.is_valid(time.time())}


def _replica(model: str, replica: Replica) -> dict[str, Any]:
    return {
        "model": model,
        "url": replica.link.settings.url,
        "up": replica.up,
        "slow": replica.slow,
        "drained": replica.drained,
        "canary": replica.canary,
        "shadow": replica.shadow,
        "in_flight": replica.in_flight,
        "requests": replica.requests,
        "failures": replica.failures,
    }
