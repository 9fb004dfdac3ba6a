"""The OpenAPI document of a predict server, with the shapes of the model that is loaded."""

from __future__ import annotations

from typing import Any

from armillary import __version__
from armillary.serving.predict.schema import Field, Schema, Shape

_INTEGERS = ("int", "uint")
_CODES = {
    "408": "the body did not come in time",
    "413": "the body is too large",
    "422": "the request does not fit the model",
    "429": "the queue is full",
    "500": "the model failed",
    "503": "no model is loaded",
    "504": "no answer in time",
}


def document(schema: Schema | None) -> dict[str, Any]:
    """OpenAPI 3.1."""
    health = _object(
        {"status": {"type": "string"}, "model_loaded": {"type": "boolean"}, "avg_latency_ms": {"type": "number"}}
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "armillary predict", "version": __version__},
        "paths": {
            "/predict": {
                "post": {
                    "summary": "Run the model",
                    "requestBody": {"required": True, "content": _json(_request(schema))},
                    "responses": {
                        "200": {"description": "outputs", "content": _json(_response())},
                        **{
                            code: {"description": text, "content": _json(_object({"error": {"type": "string"}}))}
                            for code, text in _CODES.items()
                        },
                    },
                }
            },
            "/health": {
                "get": {
                    "summary": "Whether it lives",
                    "responses": {"200": {"description": "state", "content": _json(health)}},
                }
            },
        },
    }


def _request(schema: Schema | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "object"}
    named = {"inputs": _object({field.name: _rows(field, schema.batched) for field in schema.inputs})}
    forms = [_object(named)]
    if len(schema.inputs) == 1:
        forms.insert(0, _object({"features": _rows(schema.inputs[0], schema.batched)}))
    return {"oneOf": forms}


def _response() -> dict[str, Any]:
    latency = {"latency_ms": {"type": "number"}}
    return {
        "oneOf": [
            _object({"prediction": {"type": "array"}, **latency}),
            _object({"outputs": {"type": "object"}, **latency}),
        ]
    }


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


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
