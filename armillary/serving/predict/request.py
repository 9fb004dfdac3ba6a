"""From the JSON of a request to arrays, held against the model's schema; a sentence says what does not fit.

{"features": […]}                 one row, or a list of rows, of a model with one input
{"inputs": {"name": […], …}}      the same by name, for any number of inputs
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from armillary.errors import nearest
from armillary.serving.predict.schema import Field, Schema

_KINDS = {"f": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "true or false"}


class Unfit(Exception):
    """A request that the model cannot take; its text is for the client."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request in arrays."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    """one an input, rows first where the model is batched"""
    rows: int
    """how many"""
    single: bool
    """one row was given as it is, and is answered so"""
    named: bool
    """inputs came by name, and outputs go so"""

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """Requests of one key can be run together."""
        return tuple(array.shape[1:] for array in self.arrays)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Unfit(f'the body is not JSON ({error}); send {{"features": [...]}}') from None
    if not isinstance(found, dict):
        raise Unfit('the body is not an object; send {"features": [...]}')
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def read(body: dict[str, Any], schema: Schema, *, most_rows: int) -> Asked:
    """Arrays for the model, or Unfit with what is wrong."""
    values, named = _values(body, schema)
    raw = [_array(values[field.name], field) for field in schema.inputs]
    if not schema.batched:
        arrays = [_shaped(array, field, field.shape) for array, field in zip(raw, schema.inputs, strict=True)]
        return Asked(arrays=tuple(arrays), rows=1, single=True, named=named)
    single = _is_single(raw, schema)
    arrays = [_rows(array, field, single) for array, field in zip(raw, schema.inputs, strict=True)]
    counts = {len(array) for array in arrays}
    if len(counts) > 1:
        raise Unfit(f"inputs have different numbers of rows ({', '.join(map(str, sorted(counts)))})")
    rows = counts.pop()
    if not 1 <= rows <= most_rows:
        raise Unfit(f"{rows} rows; send from 1 to {most_rows} in one request")
    return Asked(arrays=tuple(arrays), rows=rows, single=single, named=named)


def _values(body: dict[str, Any], schema: Schema) -> tuple[dict[str, Any], bool]:
    """Name -> what was given."""
    if set(body) == {"features"}:
        if len(schema.inputs) != 1:
            names = ", ".join(field.name for field in schema.inputs)
            raise Unfit(f'this model has {len(schema.inputs)} inputs ({names}); send {{"inputs": {{"name": [...]}}}}')
        return {schema.inputs[0].name: body["features"]}, False
    if set(body) != {"inputs"} or not isinstance(body["inputs"], dict):
        extra = sorted(set(body) - {"features", "inputs"})
        told = f"unknown key '{extra[0]}'" if extra else "neither features nor inputs given alone"
        raise Unfit(f'{told}; send {{"features": [...]}} or {{"inputs": {{"name": [...]}}}}')
    given = body["inputs"]
    for name in given:
        if schema.field(name) is None:
            options = [field.name for field in schema.inputs]
            raise Unfit(f"no input '{name}'; did you mean {nearest(name, options) or ', '.join(options)}?")
    lacking = [field.name for field in schema.inputs if field.name not in given]
    if lacking:
        raise Unfit(f"input '{lacking[0]}' is missing")
    return given, True


def _array(value: Any, field: Field) -> np.ndarray[Any, Any]:
    """`value` in the field's number format; nothing is rounded, cut or guessed."""
    wanted = np.dtype("float32" if field.dtype == "bfloat16" else field.dtype)
    if _has_text(value):
        raise Unfit(f"{field.name}: want {_KINDS.get(wanted.kind, 'values')} ({field.words})")
    try:
        found = np.array(value)
    except (ValueError, OverflowError):
        raise Unfit(f"{field.name}: rows of different lengths; want {field.words}") from None
    if found.size == 0:
        found = found.astype(wanted)
    if found.dtype.kind not in ("iuf" if wanted.kind == "f" else "iu" if wanted.kind in "iu" else wanted.kind):
        raise Unfit(f"{field.name}: want {_KINDS.get(wanted.kind, 'values')} ({field.words})")
    if wanted.kind in "iu" and found.size:
        info = np.iinfo(wanted)
        if int(found.min()) < info.min or int(found.max()) > info.max:
            raise Unfit(f"{field.name}: values beyond {info.min} to {info.max} ({field.words})")
    with np.errstate(over="ignore"):
        made = found.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(made).all():
        raise Unfit(f"{field.name}: a number beyond the range of {field.dtype}")
    return cast("np.ndarray[Any, Any]", made)


def _has_text(value: Any) -> bool:
    """Whether a text or an object is among the numbers: as an array, every item would take as much as the longest."""
    level = [[value]]
    while level:
        kinds = {kind for items in level for kind in set(map(type, items))}
        if not kinds.isdisjoint((str, dict)):
            return True
        level = [item for items in level for item in items if type(item) is list] if list in kinds else []
    return False


def _is_single(raw: list[np.ndarray[Any, Any]], schema: Schema) -> bool:
    """Whether arrays are one row each: a dim fewer than the model's. Of unknown shapes, a flat list is a row."""
    first = schema.inputs[0]
    return raw[0].ndim == 1 if first.shape is None else raw[0].ndim == len(first.shape) - 1


def _rows(array: np.ndarray[Any, Any], field: Field, single: bool) -> np.ndarray[Any, Any]:
    return _shaped(array[None] if single else array, field, None if field.shape is None else (None, *field.shape[1:]))


def _shaped(array: np.ndarray[Any, Any], field: Field, shape: tuple[int | None, ...] | None) -> np.ndarray[Any, Any]:
    if shape is None:
        return array
    fits = array.ndim == len(shape) and all(
        size is None or size == got for size, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        want = f"a row of shape {_text(shape[1:])}, or a list of such rows" if shape[:1] == (None,) else _text(shape)
        got = array.shape[1:] if shape[:1] == (None,) and array.ndim == len(shape) else array.shape
        raise Unfit(f"{field.name}: got shape {_text(got)}, want {want} ({field.dtype})")
    return array


def _text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def reply(asked: Asked, outputs: list[np.ndarray[Any, Any]], schema: Schema) -> dict[str, Any]:
    """The JSON of an answer but for its latency: `prediction` of a model with one output, `outputs` by name else."""
    plain = [_plain(output[0] if asked.single and schema.batched else output) for output in outputs]
    if len(plain) == 1 and not asked.named:
        value = plain[0]
        return {"prediction": value if isinstance(value, list) else [value]}
    names = [field.name for field in schema.outputs]
    return {"outputs": dict(zip(names, plain, strict=True))}


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Lists of numbers; what JSON has no number for is null."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _with_nulls(array.tolist())
    return array.tolist()


def _with_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    return value if np.isfinite(value) else None
