"""The OpenAPI document of a gateway: paths that it forwards to servers, its own, and those of an admin API."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from armillary.serving.http import openapi
from armillary.serving.http.openapi import json_content, object_schema, responses
from armillary.serving.openai import openapi as server

_ERROR = {"$ref": "#/components/schemas/Error"}
_OWN = {
    400: "the request cannot be served as it is, or a guard blocks it",
    403: "the key may not use this model",
    429: "a limit or budget is reached, or too many requests wait; see Retry-After",
    502: "no replica could answer",
    503: "no replica is free, or limits cannot be counted; see Retry-After",
}
_GETS = ("/v1/models", "/v1/models/{model}", "/health", "/ready")
_NAME = {"type": "string", "minLength": 1}
_COUNT = {"type": ["integer", "null"], "minimum": 1}
_LIMITS = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"requests": _COUNT, "tokens": _COUNT, "window_s": {"type": "number", "exclusiveMinimum": 0}},
}
_BUDGET = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "tokens": _COUNT,
        "usd": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "period": {"enum": ["day", "month"]},
    },
}
_KEY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": _NAME,
        "models": {"type": "array", "items": {"type": "string"}},
        "scopes": {"type": "array", "items": {"enum": ["inference", "metrics"]}},
        "limits": _LIMITS,
        "model_limits": {"type": "object", "additionalProperties": _LIMITS},
        "budget": _BUDGET,
        "priority": {"type": "integer"},
        "weight": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e6},
        "expires": {"type": ["number", "null"]},
    },
}
_ROTATION = {"type": "object", "properties": {"overlap_s": {"type": "number", "minimum": 0, "maximum": 1e9}}}
_REPLICA = object_schema({"url": {"type": "string"}})


def document(forwarded: Collection[str], *, admin: bool) -> dict[str, Any]:
    """`forwarded`: the paths that go to replicas; `admin`: there is an admin API."""
    table = server.document()
    paths: dict[str, Any] = {path: table["paths"][path] for path in (*forwarded, *_GETS)}
    for path in forwarded:
        paths[path]["post"]["responses"] |= responses(_OWN, _ERROR)
    paths["/v1/models/{model}"]["get"]["responses"] |= responses({403: _OWN[403]}, _ERROR)
    components = table["components"]
    if admin:
        paths |= _admin_paths()
        components["securitySchemes"]["signature"] = {"type": "apiKey", "in": "header", "name": "authorization"}
    return openapi.document("armillary gateway", paths, components=components)


def _admin_paths() -> dict[str, Any]:
    return {
        "/admin/keys": {"get": _call("All keys"), "post": _call("A new key", _KEY)},
        "/admin/keys/{id}": {"delete": _call("Revoke a key"), "parameters": [_ID]},
        "/admin/keys/{id}/rotate": {"post": _call("A new secret of a key", _ROTATION), "parameters": [_ID]},
        "/admin/usage": {"get": _call("Tokens and dollars per client and model")},
        "/admin/replicas": {"get": _call("Replicas and their state")},
        "/admin/replicas/drain": {"post": _call("Send a replica no new requests", _REPLICA)},
        "/admin/replicas/resume": {"post": _call("Send it requests again", _REPLICA)},
    }


_ID = {"name": "id", "in": "path", "required": True, "schema": _NAME}


def _call(summary: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    statuses = {400: "the call cannot be made so", 401: "it is not signed", 404: "no such call", 413: "it is too large"}
    results = responses({200: summary}, {"type": "object"}) | responses(statuses, _ERROR)
    call: dict[str, Any] = {"summary": summary, "security": [{"signature": []}], "responses": results}
    return call | ({"requestBody": {"required": True, "content": json_content(body)}} if body is not None else {})
