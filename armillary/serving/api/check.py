"""Bodies against their schemas: the part of JSON Schema that `schemas.py` uses, with one line that names the field.

The same schemas are the server's OpenAPI document, so what is documented is what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from armillary.serving.api.problem import Problem, bad

Schema = Mapping[str, Any]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "null": ("null", lambda value: value is None),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a number", _is_number),
    "string": ("text", lambda value: isinstance(value, str)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
}


def check(value: Any, schema: Schema, path: str = "") -> None:
    """Problem 400 where `value` is not what `schema` describes."""
    if "anyOf" in schema:
        return _any_of(value, schema["anyOf"], path)
    kinds = schema.get("type")
    if kinds is not None:
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not any(_KINDS[kind][1](value) for kind in kinds):
            wanted = " or ".join(_KINDS[kind][0] for kind in kinds)
            raise bad(f"{path or 'the body'} must be {wanted}, not {_short(value)}; correct the request", path or None)
    if "enum" in schema and value not in schema["enum"]:
        options = ", ".join(map(str, schema["enum"]))
        raise bad(f"{path} must be one of {options}, not {_short(value)}; correct the request", path)
    if _is_number(value):
        _bounds(value, schema, path)
    elif isinstance(value, str):
        _lengths(len(value), schema.get("minLength", 0), schema.get("maxLength"), "characters", path)
    elif isinstance(value, list):
        _list(value, schema, path)
    elif isinstance(value, dict):
        _object(value, schema, path)
    return None


def _any_of(value: Any, options: list[Schema], path: str) -> None:
    """One of `options` that is for values of this kind must fit; else the complaint that came furthest is raised."""
    fitting = [option for option in options if any(_KINDS[kind][1](value) for kind in _listed(option["type"]))]
    if not fitting:
        wanted = " or ".join(dict.fromkeys(_KINDS[kind][0] for option in options for kind in _listed(option["type"])))
        raise bad(f"{path or 'the body'} must be {wanted}, not {_short(value)}; correct the request", path or None)
    found: list[Problem] = []
    for option in fitting:
        try:
            return check(value, option, path)
        except Problem as problem:
            found.append(problem)
    raise max(found, key=lambda problem: len(problem.param or ""))


def _listed(kinds: Any) -> tuple[str, ...]:
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _bounds(value: float, schema: Schema, path: str) -> None:
    low, high = schema.get("minimum"), schema.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        wanted = f"from {low:,} to {high:,}" if low is not None and high is not None else (
            f"at least {low:,}" if low is not None else f"at most {high:,}")  # fmt: skip
        raise bad(f"{path} must be {wanted}, not {_short(value)}; correct the request", path)


def _lengths(length: int, low: int, high: int | None, what: str, path: str) -> None:
    if length < low:
        raise bad(f"{path} must have at least {low} {what}; correct the request", path)
    if high is not None and length > high:
        raise bad(f"{path} has {length:,} {what} and may have {high:,}; shorten it", path)


def _list(value: list[Any], schema: Schema, path: str) -> None:
    _lengths(len(value), schema.get("minItems", 0), schema.get("maxItems"), "items", path)
    items = schema.get("items")
    if items is None:
        return
    if items.get("type") == "integer" and set(map(type, value)) <= {int}:  # token ids: thousands, looked at at once
        for extreme in {min(value), max(value)} if value else ():
            _bounds(extreme, items, f"{path}[{value.index(extreme)}]")
        return
    for i, item in enumerate(value):
        check(item, items, f"{path}[{i}]")


def _object(value: dict[str, Any], schema: Schema, path: str) -> None:
    for name in schema.get("required", ()):
        if name not in value:
            where = f"{path}.{name}" if path else name
            raise bad(f"{where} is missing; add it to the request", where)
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    if "maxProperties" in schema:
        _lengths(len(value), 0, schema["maxProperties"], "keys", path)
    for name, item in value.items():
        known = properties.get(name, others)
        if isinstance(known, Mapping):
            check(item, known, f"{path}.{name}" if path else name)


def _short(value: Any) -> str:
    """A value as an error line shows it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 200:
        return "a very long number"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…'"
