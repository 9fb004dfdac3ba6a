"""The OpenAPI document, made of the schemas that bodies are checked against."""

from __future__ import annotations

from typing import Any

from armillary import __version__
from armillary.serving.api import schemas

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"},
                       "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}}}},
}  # fmt: skip
_STATUSES = {
    400: "the request cannot be served as it is", 401: "the API key is missing or wrong", 404: "no such model",
    408: "the body came too slowly", 413: "the body is too large", 429: "too many requests wait; see Retry-After",
    500: "the engine could not answer", 503: "the engine is not there; see Retry-After", 504: "it took too long",
}  # fmt: skip
_USAGE = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "armillary", "version": __version__,
                 "description": "An OpenAI-compatible server of one transformer model."},
        "paths": {
            "/v1/chat/completions": _post("chat", "Answer a chat", schemas.CHAT, _answers("message"), stream=True),
            "/v1/completions": _post("complete", "Continue a text", schemas.COMPLETION, _answers("text"), stream=True),
            "/tokenize": _post("tokenize", "Token ids of a text or a conversation", schemas.TOKENIZE, {
                "type": "object", "required": ["tokens", "count", "max_model_len"],
                "properties": {"tokens": {"type": "array", "items": {"type": "integer"}},
                               "count": {"type": "integer"}, "max_model_len": {"type": "integer"}}}),
            "/detokenize": _post("detokenize", "Text of token ids", schemas.DETOKENIZE, {
                "type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}}),
            "/v1/models": _get("models", "The model that is served"),
            "/v1/models/{model}": _model(),
            "/health": _get("health", "The process is there", {200: "it is"}),
            "/ready": _get("ready", "The model is loaded and the engine steps", {200: "it does", 503: "it does not"}),
        },
        "components": {"schemas": {"Error": _ERROR},
                       "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }  # fmt: skip


def _answers(key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"}, "object": {"type": "string"}, "created": {"type": "integer"},
            "model": {"type": "string"}, "usage": _USAGE,
            "choices": {"type": "array", "items": {"type": "object", "required": ["index", key, "finish_reason"]}},
        },
    }  # fmt: skip


def _post(
    name: str, about: str, body: dict[str, Any], answer: dict[str, Any], *, stream: bool = False
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"post": {
        "operationId": name, "summary": about, "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": content}} | _errors(),
    }}  # fmt: skip


def _errors(*only: int) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(status): {"description": about, "content": error} for status, about in _STATUSES.items()
            if not only or status in only}  # fmt: skip


def _get(name: str, about: str, statuses: dict[int, str] | None = None) -> dict[str, Any]:
    answer = {"application/json": {"schema": {"type": "object"}}}
    found = {str(status): {"description": text, "content": answer}
             for status, text in (statuses or {200: about}).items()}  # fmt: skip
    locked = {} if statuses else _errors(401)
    return {"get": {"operationId": name, "summary": about, "security": [{}, {"key": []}], "responses": found | locked}}


def _model() -> dict[str, Any]:
    found = _get("model", "One model")
    found["get"]["parameters"] = [{"name": "model", "in": "path", "required": True,
                                   "schema": {"type": "string", "minLength": 1}}]  # fmt: skip
    found["get"]["responses"] |= _errors(401, 404)
    return found
