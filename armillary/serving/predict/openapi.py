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
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype", "data"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"enum": ["BOOL", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"]},
        "data": {"type": "array"},
    },
}
_TENSORS = {
    "type": "object",
    "required": ["inputs"],
    "properties": {"id": {"type": "string"}, "inputs": {"type": "array", "items": _TENSOR}},
}
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
    paths = {"/predict": {"post": predict}, "/health": {"get": get_health}}
    return openapi.document("armillary predict", paths | _kserve_paths())


def _kserve_paths() -> dict[str, Any]:
    """KServe's protocol, version 2."""
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    version = {**name, "name": "version"}
    paths: dict[str, Any] = {
        "/v2": {"get": _get("The server")},
        "/v2/health/live": {"get": _get("Liveness")},
        "/v2/health/ready": {"get": _get("Readiness")},
    }
    for base, names in (("/v2/models/{name}", [name]), ("/v2/models/{name}/versions/{version}", [name, version])):
        infer = _get("Run the model") | {"requestBody": {"required": True, "content": json_content(_TENSORS)}}
        paths |= {
            base: {"get": _get("Inputs and outputs of the model"), "parameters": names},
            f"{base}/ready": {"get": _get("Readiness of the model"), "parameters": names},
            f"{base}/infer": {"post": infer, "parameters": names},
        }
    return paths


def _get(summary: str) -> dict[str, Any]:
    statuses = {400: "the request does not fit the model", 401: "the API key is missing or wrong", 404: "no such model"}
    errors = responses(statuses | _STATUSES, _object({"error": {"type": "string"}}))
    errors["503"] = responses({503: "not ready"}, {"type": "object"})["503"]
    return {"summary": summary, "responses": responses({200: summary}, {"type": "object"}) | errors}


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
