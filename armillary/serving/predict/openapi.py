"""The OpenAPI document of a predict server, with the shapes of the loaded model."""

from functools import partial
from typing import Any

from armillary.serving.http import openapi
from armillary.serving.http.openapi import json_content, object_schema, responses
from armillary.serving.predict.schema import Field, Schema, Shape

_INTEGERS = ("int", "uint")
_STATUSES = {
    408: "the body did not arrive in time",
    413: "the body is too large",
    422: "the request does not fit the model",
    429: "the queue is full",
    500: "the model failed",
    503: "no model is loaded",
    504: "the request timed out",
}
_object = partial(object_schema, additionalProperties=False)
_LATENCY = {"latency_ms": {"type": "number"}}
_RESPONSE = {
    "oneOf": [
        _object({"prediction": {"type": "array"}, **_LATENCY}),
        _object({"outputs": {"type": "object"}, **_LATENCY}),
    ]
}


def document(schema: Schema | None) -> dict[str, Any]:
    health = {"status": {"type": "string"}, "model_loaded": {"type": "boolean"}, "avg_latency_ms": {"type": "number"}}
    predict = {
        "summary": "Run the model",
        "requestBody": {"required": True, "content": json_content(_request(schema))},
        "responses": responses({200: "outputs"}, _RESPONSE)
        | responses(_STATUSES, _object({"error": {"type": "string"}})),
    }
    get_health = {"summary": "Health", "responses": responses({200: "state"}, _object(health))}
    return openapi.document("armillary predict", {"/predict": {"post": predict}, "/health": {"get": get_health}})


def _request(schema: Schema | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "object"}
    inputs = _object({field.name: _rows(field, schema.batched) for field in schema.inputs})
    forms = [_object({"inputs": inputs})]
    if len(schema.inputs) == 1:
        forms.insert(0, _object({"features": _rows(schema.inputs[0], schema.batched)}))
    return {"oneOf": forms}


def _rows(field: Field, batched: bool) -> dict[str, Any]:
    """One row, or a list of rows."""
    if field.shape is None:
        return {"type": "array"}
    if not batched:
        return _nested(field, field.shape)
    row = _nested(field, field.shape[1:])
    return {"oneOf": [row, {"type": "array", "items": row, "minItems": 1}]}


def _nested(field: Field, shape: Shape) -> dict[str, Any]:
    if not shape:
        kind = "boolean" if field.dtype == "bool" else "integer" if field.dtype.startswith(_INTEGERS) else "number"
        return {"type": kind}
    size = {} if shape[0] is None else {"minItems": shape[0], "maxItems": shape[0]}
    return {"type": "array", "items": _nested(field, shape[1:]), **size}
