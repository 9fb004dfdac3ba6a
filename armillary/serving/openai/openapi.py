"""The OpenAPI document, made of the classes that bodies are read into."""

from __future__ import annotations

from typing import Any

import msgspec

from armillary import __version__
from armillary.serving.openai import schemas
from armillary.spec.toml.fields import help_of

_BODIES = {
    "/v1/chat/completions": schemas.Chat,
    "/v1/completions": schemas.Completion,
    "/tokenize": schemas.Tokenize,
    "/detokenize": schemas.Detokenize,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "the request cannot be served as it is",
    401: "the API key is missing or wrong",
    404: "no such model",
    408: "the body came too slowly, or the answer took longer than timeout_s",
    413: "the body is too large",
    429: "too many requests wait; see Retry-After",
    500: "the engine could not answer",
    503: "the engine is not there; see Retry-After",
    504: "it took longer than the server allows",
}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_USAGE = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    references, components = msgspec.json.schema_components(
        list(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(_BODIES, references, strict=True))
    answers = {
        "/v1/chat/completions": ("Answer a conversation", _answers("message")),
        "/v1/completions": ("Continue a text", _answers("text")),
        "/tokenize": (
            "Token ids of a text or a conversation",
            _object(tokens=_INTEGERS, count={"type": "integer"}, max_model_len={"type": "integer"}),
        ),
        "/detokenize": ("Text of token ids", _object(prompt={"type": "string"})),
    }
    posts = {path: _post(path, *answers[path], bodies[path]) for path in _BODIES}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "armillary",
            "version": __version__,
            "description": "An OpenAI-compatible server of one transformer model.",
        },
        "paths": posts
        | {
            "/v1/models": _get("The model that is served"),
            "/v1/models/{model}": _model(),
            "/health": _get("An engine is there or on its way", {200: "it is", 503: "only a new server may help"}),
            "/ready": _get("The model is loaded and the engine steps", {200: "it does", 503: "it does not"}),
        },
        "components": {
            "schemas": {name: _described(name, table) for name, table in components.items()} | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """The help of every field, as it stands under it."""
    kind = getattr(schemas, name)
    texts = {
        field: text
        for base in reversed(kind.__mro__)
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct
        for field, text in help_of(base).items()
    }
    for field, entry in table.get("properties", {}).items():
        if texts.get(field):
            entry["description"] = texts[field]
    return table


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _answers(key: str) -> dict[str, Any]:
    texts = {name: {"type": "string"} for name in ("id", "object", "model")}
    choices = {"type": "array", "items": {"type": "object", "required": ["index", key, "finish_reason"]}}
    return _object(**texts, created={"type": "integer"}, choices=choices, usage=_USAGE)


def _post(path: str, about: str, answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if path.startswith("/v1/"):
        content["text/event-stream"] = {"schema": _object(data={"type": "string"})}
    return {
        "post": {
            "operationId": path.strip("/").replace("/", "_"),
            "summary": about,
            "security": [{}, {"key": []}],
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "the answer", "content": content}} | _errors(),
        }
    }


def _errors(*only: int) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": about, "content": error}
        for status, about in _STATUSES.items()
        if not only or status in only
    }


def _get(about: str, statuses: dict[int, str] | None = None) -> dict[str, Any]:
    answer = {"application/json": {"schema": {"type": "object"}}}
    found = {
        str(status): {"description": text, "content": answer} for status, text in (statuses or {200: about}).items()
    }
    locked = {} if statuses else _errors(401)
    return {"get": {"summary": about, "security": [{}, {"key": []}], "responses": found | locked}}


def _model() -> dict[str, Any]:
    found = _get("One model")
    found["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    found["get"]["responses"] |= _errors(401, 404)
    return found
