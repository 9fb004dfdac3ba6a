"""The OpenAPI document of the OpenAI-compatible server, derived from the classes of `schemas.py`."""

from typing import Any

import msgspec

from armillary.serving.http import openapi
from armillary.serving.http.openapi import json_content, object_schema, responses
from armillary.serving.openai import messages_request, pooling_request, responses_request, schemas
from armillary.spec.toml.fields import help_of

_BODIES = {
    "/v1/chat/completions": schemas.ChatRequest,
    "/v1/completions": schemas.CompletionRequest,
    "/v1/messages": messages_request.MessagesRequest,
    "/v1/messages/count_tokens": messages_request.CountTokensRequest,
    "/v1/responses": responses_request.ResponsesRequest,
    "/v1/embeddings": pooling_request.EmbeddingRequest,
    "/v1/rerank": pooling_request.RerankRequest,
    "/v1/score": pooling_request.ScoreRequest,
    "/v1/load_lora_adapter": schemas.LoadAdapterRequest,
    "/v1/unload_lora_adapter": schemas.UnloadAdapterRequest,
    "/tokenize": schemas.TokenizeRequest,
    "/detokenize": schemas.DetokenizeRequest,
}
_MODULES = (schemas, messages_request, responses_request, pooling_request)
_OPTIONAL_TEXT = {"type": ["string", "null"]}
_ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": _OPTIONAL_TEXT,
    "code": _OPTIONAL_TEXT,
}
_ERROR = object_schema({"error": object_schema(_ERROR_FIELDS)})
_STATUSES = {
    400: "the request cannot be served as it is",
    401: "the API key is missing or wrong",
    403: "the server's recipe does not allow it",
    404: "no such model",
    408: "the body arrived too slowly, or the request took longer than timeout_s",
    413: "the body is too large",
    429: "too many requests wait; see Retry-After",
    500: "the engine failed",
    503: "the engine is not available; see Retry-After",
    504: "the request took longer than the server allows",
}
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_USAGE = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
}


_SCORED = {"data": {"type": "array"}, "model": {"type": "string"}, "usage": _USAGE}
_ADAPTER_CHANGED = object_schema({"status": {"type": "string"}, "lora_name": {"type": "string"}})
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_COMPLETE = ("/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/v1/score", *_ADAPTERS)
"""paths whose responses are never streamed"""


def document() -> dict[str, Any]:
    references, components = msgspec.json.schema_components(
        list(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(_BODIES, references, strict=True))
    operations = {
        "/v1/chat/completions": ("Complete a conversation", _completion("message")),
        "/v1/completions": ("Continue a text", _completion("text")),
        "/v1/messages": (
            "Complete a conversation, as Anthropic's API",
            object_schema({"type": {"const": "message"}, "content": {"type": "array"}, "usage": {"type": "object"}}),
        ),
        "/v1/messages/count_tokens": (
            "Tokens of a conversation, as Anthropic's API",
            object_schema({"input_tokens": {"type": "integer"}}),
        ),
        "/v1/responses": (
            "Respond to an input, as OpenAI's newer API",
            object_schema({"object": {"const": "response"}, "output": {"type": "array"}, "usage": {"type": "object"}}),
        ),
        "/v1/embeddings": ("Vectors of texts", object_schema({"object": {"const": "list"}} | _SCORED)),
        "/v1/rerank": (
            "Documents in the order in which they fit a query",
            object_schema({"id": {"type": "string"}, "results": {"type": "array"}, "usage": _USAGE}),
        ),
        "/v1/score": ("How well pairs of texts fit", object_schema({"id": {"type": "string"}} | _SCORED)),
        "/v1/load_lora_adapter": ("Load a LoRA adapter", _ADAPTER_CHANGED),
        "/v1/unload_lora_adapter": ("Forget a LoRA adapter", _ADAPTER_CHANGED),
        "/tokenize": (
            "Token ids of a text or a conversation",
            object_schema({"tokens": _INTEGERS, "count": {"type": "integer"}, "max_model_len": {"type": "integer"}}),
        ),
        "/detokenize": ("Text of token ids", object_schema({"prompt": {"type": "string"}})),
    }
    posts = {path: _post(path, *operations[path], bodies[path]) for path in _BODIES}
    gets = {
        "/v1/models": _get("The served model"),
        "/v1/models/{model}": _model(),
        "/health": _get("Liveness", {200: "the engine runs or is starting", 503: "the server must be restarted"}),
        "/ready": _get("Readiness", {200: "the engine serves requests", 503: "it does not"}),
    }
    components = {
        "schemas": {name: _described(name, table) for name, table in components.items()} | {"Error": _ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return openapi.document("armillary", posts | gets, components=components)


def _described(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """A schema with the docstring of every field as its description."""
    kind = next(getattr(module, name) for module in _MODULES if hasattr(module, name))
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


def _completion(key: str) -> dict[str, Any]:
    texts = {name: {"type": "string"} for name in ("id", "object", "model")}
    choices = {"type": "array", "items": {"type": "object", "required": ["index", key, "finish_reason"]}}
    return object_schema({**texts, "created": {"type": "integer"}, "choices": choices, "usage": _USAGE})


def _post(path: str, summary: str, result: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    content = json_content(result)
    if path.startswith("/v1/") and path not in _COMPLETE:
        content["text/event-stream"] = {"schema": object_schema({"data": {"type": "string"}})}
    return {
        "post": {
            "operationId": path.strip("/").replace("/", "_"),
            "summary": summary,
            "security": [{}, {"key": []}],
            "requestBody": {"required": True, "content": json_content(body)},
            "responses": {"200": {"description": "the result", "content": content}} | _errors(),
        }
    }


def _errors(*only: int) -> dict[str, Any]:
    statuses = {status: text for status, text in _STATUSES.items() if not only or status in only}
    return responses(statuses, {"$ref": "#/components/schemas/Error"})


def _get(summary: str, statuses: dict[int, str] | None = None) -> dict[str, Any]:
    results = responses(statuses or {200: summary}, {"type": "object"}) | ({} if statuses else _errors(401))
    return {"get": {"summary": summary, "security": [{}, {"key": []}], "responses": results}}


def _model() -> dict[str, Any]:
    operation = _get("One model")
    operation["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    ]
    operation["get"]["responses"] |= _errors(401, 404)
    return operation
