"""KServe's open inference protocol, version 2, as JSON: the names, dtypes and tensors of its requests and responses.

A tensor is {"name", "shape", "datatype", "data"}; its data are row-major, flat or nested. The binary extension is not
supported. https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from armillary.errors import nearest
from armillary.serving.predict.request import InvalidRequest, PredictRequest, parse, plain, read
from armillary.serving.predict.schema import Field, Schema

BINARY = "inference-header-content-length"
"""header of a request with binary tensors"""
_DATATYPES = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"} | {
    f"{kind}{bits}": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
_MOST_DIMS = 16
_FORM = '{"inputs": [{"name": …, "shape": […], "datatype": …, "data": […]}]}'


@dataclass(frozen=True, kw_only=True)
class InferRequest(PredictRequest):
    """A request with the fields that its response repeats."""

    id: str = ""
    outputs: tuple[str, ...] = ()  # the outputs that are wanted; empty: all


def datatype(dtype: str) -> str:
    """The protocol's name of a dtype."""
    return _DATATYPES.get(dtype, dtype.upper())


def metadata(name: str, version: str, schema: Schema) -> dict[str, Any]:
    """Names, dtypes and shapes; -1 is any size."""
    return {
        "name": name,
        "versions": [version],
        "platform": "armillary",
        "inputs": [_described(field) for field in schema.inputs],
        "outputs": [_described(field) for field in schema.outputs],
    }


def _described(field: Field) -> dict[str, Any]:
    shape = [-1] if field.shape is None else [-1 if size is None else size for size in field.shape]
    return {"name": field.name, "datatype": datatype(field.dtype), "shape": shape}


def decode_infer(body: bytes, schema: Schema, max_rows: int) -> InferRequest:
    """The arrays of a request; InvalidRequest where it does not fit the protocol or the model."""
    table = parse(body)
    tensors = table.get("inputs")
    if not isinstance(tensors, list) or not all(isinstance(each, dict) for each in tensors):
        raise InvalidRequest(f"inputs is no list of tensors; send {_FORM}")
    names = [str(each.get("name")) for each in tensors]
    if len(set(names)) < len(names):
        raise InvalidRequest(f"input '{next(name for name in names if names.count(name) > 1)}' is there twice")
    fields = {field.name: field for field in schema.inputs}
    values = {name: _values(each, fields.get(name)) for name, each in zip(names, tensors, strict=True)}
    request = read({"inputs": values}, schema, max_rows=max_rows)
    given = table.get("id")
    if given is not None and not isinstance(given, str):
        raise InvalidRequest("id is no text; send one, or leave it out")
    return InferRequest(
        arrays=request.arrays,
        rows=request.rows,
        single=request.single,
        by_name=True,
        id=given or "",
        outputs=_wanted(table.get("outputs"), schema),
    )


def _values(tensor: dict[str, Any], field: Field | None) -> Any:
    """The values of a tensor, nested as its shape says."""
    name, shape, data = tensor.get("name"), tensor.get("shape"), tensor.get("data")
    if not isinstance(name, str) or not isinstance(data, list):
        raise InvalidRequest(f"a tensor lacks its name or data; send {_FORM}")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise InvalidRequest(f"{name}: shape is no list of sizes above 0; send {_FORM}")
    if len(shape) > _MOST_DIMS:
        raise InvalidRequest(f"{name}: shape has {len(shape)} dims, and {_MOST_DIMS} are the most; send fewer")
    wanted = datatype(field.dtype) if field is not None else tensor.get("datatype")
    if tensor.get("datatype") != wanted:
        raise InvalidRequest(f"{name}: datatype is {tensor.get('datatype')!r}, want {wanted}")
    flat = list(_flat(data))
    if len(flat) != prod(shape):
        raise InvalidRequest(f"{name}: {len(flat)} values do not make a tensor of shape {shape}")
    return np.array(flat, dtype=object).reshape(shape).tolist()


def _flat(values: list[Any]) -> list[Any]:
    """The values of nested lists, level by level, so that depth costs no recursion."""
    while any(isinstance(value, list) for value in values):
        values = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return values


def _wanted(outputs: Any, schema: Schema) -> tuple[str, ...]:
    known = [field.name for field in schema.outputs]
    if outputs is None:
        return ()
    if not isinstance(outputs, list) or not all(isinstance(each, dict) for each in outputs):
        raise InvalidRequest('outputs is no list of names; send [{"name": …}], or leave it out')
    names = [str(each.get("name")) for each in outputs]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"no output '{name}'; did you mean {nearest(name, known) or ', '.join(known)}?")
    return tuple(names)


def encode_infer(request: InferRequest, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> bytes:
    """The tensors of a response, without the model's name."""
    tensors = [
        {
            "name": field.name,
            "shape": list(output.shape),
            "datatype": datatype(field.dtype),
            "data": plain(output.reshape(-1)),
        }
        for field, output in zip(schema.outputs, outputs, strict=True)
        if not request.outputs or field.name in request.outputs
    ]
    table = ({"id": request.id} if request.id else {}) | {"outputs": tensors}
    return json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
