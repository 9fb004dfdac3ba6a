"""Requests as arrays, checked against the model's schema, and responses as JSON.

{"features": […]}                 one row, or a list of rows, of a model with one input
{"inputs": {"name": […], …}}      the same by name, for any number of inputs
"""

import json
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from armillary.errors import nearest
from armillary.serving.predict.schema import Field, Schema, Shape, shape_text

_KINDS = {"f": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "true or false"}


class InvalidRequest(Exception):
    """A request that does not fit the model; its text is for the client."""


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """A request as one array per input, rows first where the model is batched."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    rows: int
    single: bool
    """whether the request, and so its response, is a row rather than a list of rows"""
    by_name: bool
    """whether inputs, and so outputs, are given by name"""

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """Requests with the same key can share a batch."""
        return tuple(array.shape[1:] for array in self.arrays)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        table = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f'the body is not JSON ({error}); send {{"features": [...]}}') from None
    if not isinstance(table, dict):
        raise InvalidRequest('the body is not an object; send {"features": [...]}')
    return table


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def read(body: dict[str, Any], schema: Schema, *, max_rows: int) -> PredictRequest:
    """The arrays of a request; InvalidRequest where it does not fit."""
    values, by_name = _values(body, schema)
    raw = [_array(values[field.name], field) for field in schema.inputs]
    if not schema.batched:
        arrays = [_shaped(array, field, field.shape) for array, field in zip(raw, schema.inputs, strict=True)]
        return PredictRequest(arrays=tuple(arrays), rows=1, single=True, by_name=by_name)
    wanted = schema.inputs[0].shape
    single = raw[0].ndim == (1 if wanted is None else len(wanted) - 1)  # without a shape, a flat array is one row
    arrays = [_rows(array, field, single) for array, field in zip(raw, schema.inputs, strict=True)]
    counts = {len(array) for array in arrays}
    if len(counts) > 1:
        raise InvalidRequest(f"inputs have different numbers of rows ({', '.join(map(str, sorted(counts)))})")
    rows = counts.pop()
    if not 1 <= rows <= max_rows:
        raise InvalidRequest(f"{rows} rows; send from 1 to {max_rows} in one request")
    return PredictRequest(arrays=tuple(arrays), rows=rows, single=single, by_name=by_name)


def _values(body: dict[str, Any], schema: Schema) -> tuple[dict[str, Any], bool]:
    """(name -> value, whether inputs are given by name)."""
    names = [field.name for field in schema.inputs]
    if set(body) == {"features"}:
        if len(names) != 1:
            raise InvalidRequest(
                f'this model has {len(names)} inputs ({", ".join(names)}); send {{"inputs": {{"name": [...]}}}}'
            )
        return {names[0]: body["features"]}, False
    if set(body) != {"inputs"} or not isinstance(body["inputs"], dict):
        extra = sorted(set(body) - {"features", "inputs"})
        problem = f"unknown key '{extra[0]}'" if extra else "neither features nor inputs given alone"
        raise InvalidRequest(f'{problem}; send {{"features": [...]}} or {{"inputs": {{"name": [...]}}}}')
    given = body["inputs"]
    for name in given:
        if name not in names:
            raise InvalidRequest(f"no input '{name}'; did you mean {nearest(name, names) or ', '.join(names)}?")
    lacking = [name for name in names if name not in given]
    if lacking:
        raise InvalidRequest(f"input '{lacking[0]}' is missing")
    return given, True


def _array(value: Any, field: Field) -> np.ndarray[Any, Any]:
    """`value` in the field's dtype; nothing is rounded, truncated or guessed."""
    wanted = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if _has_text(value):
        raise InvalidRequest(f"{field.name}: want {_KINDS.get(wanted.kind, 'values')} ({field.text})")
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{field.name}: rows of different lengths; want {field.text}") from None
    if array.size == 0:
        array = array.astype(wanted)
    if array.dtype.kind not in ("iuf" if wanted.kind == "f" else "iu" if wanted.kind in "iu" else wanted.kind):
        raise InvalidRequest(f"{field.name}: want {_KINDS.get(wanted.kind, 'values')} ({field.text})")
    if wanted.kind in "iu" and array.size:
        info = np.iinfo(wanted)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise InvalidRequest(f"{field.name}: values beyond {info.min} to {info.max} ({field.text})")
    with np.errstate(over="ignore"):
        converted = array.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(converted).all():
        raise InvalidRequest(f"{field.name}: a number beyond the range of {field.dtype}")
    return cast("np.ndarray[Any, Any]", converted)


def _has_text(value: Any) -> bool:
    """Whether a text or an object is among the numbers: in a numpy array every item would take as much memory as it."""
    level = [[value]]
    while level:
        kinds = {kind for items in level for kind in set(map(type, items))}
        if not kinds.isdisjoint((str, dict)):
            return True
        level = [item for items in level for item in items if type(item) is list] if list in kinds else []
    return False


def _rows(array: np.ndarray[Any, Any], field: Field, single: bool) -> np.ndarray[Any, Any]:
    return _shaped(array[None] if single else array, field, None if field.shape is None else (None, *field.shape[1:]))


def _shaped(array: np.ndarray[Any, Any], field: Field, shape: Shape | None) -> np.ndarray[Any, Any]:
    if shape is None:
        return array
    fits = array.ndim == len(shape) and all(
        size is None or size == got for size, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        want = (
            f"a row of shape {shape_text(shape[1:])}, or a list of such rows"
            if shape[:1] == (None,)
            else shape_text(shape)
        )
        got = array.shape[1:] if shape[:1] == (None,) and array.ndim == len(shape) else array.shape
        raise InvalidRequest(f"{field.name}: got shape {shape_text(got)}, want {want} ({field.dtype})")
    return array


def response_table(request: PredictRequest, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> dict[str, Any]:
    """A response without its latency: `prediction` for a single output, else `outputs` by name."""
    values = [plain(output[0] if request.single and schema.batched else output) for output in outputs]
    if len(values) == 1 and not request.by_name:
        return {"prediction": values[0] if isinstance(values[0], list) else values}
    return {"outputs": {field.name: value for field, value in zip(schema.outputs, values, strict=True)}}


def plain(array: np.ndarray[Any, Any]) -> Any:
    """Lists of numbers; infinities and NaN are null."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return np.where(np.isfinite(array), array.astype(object), None).tolist()
    return array.tolist()
