"""What an answer must match, in the ways a body may say it: `response_format`, vLLM's `structured_outputs` and its
older `guided_*` fields. One of them at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from armillary.engine.request.constraint import Structure
from armillary.errors import BadInput
from armillary.serving.http.problem import bad
from armillary.serving.openai.schemas import Asked, ResponseFormat, StructuredOutputs

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
"""of structured_outputs: they would change what may be written"""
_MOST_SOURCE = 64_000
"""characters of a schema, expression or grammar"""
_MOST_DEPTH = 48
"""levels of a schema"""
_MOST_MULTIPLE = 10_000
"""larger ones take seconds to compile"""


def structure_of(body: Asked) -> Structure | None:
    """What a body asks an answer to match; Problem 400 where it asks twice."""
    given = [(name, kind, getattr(body, name)) for name, kind in _GUIDED.items() if getattr(body, name) is not None]
    found = [_made(kind, source, name) for name, kind, source in given]
    if body.structured_outputs is not None:
        found.append(_of_outputs(body.structured_outputs))
    by_format = _of_format(body.response_format)
    names = [name for name, _, _ in given] + ["structured_outputs"] * (body.structured_outputs is not None)
    if by_format is not None:
        found, names = [*found, by_format], [*names, "response_format"]
    if len(found) > 1:
        raise bad(f"{' and '.join(names)} are given together; give one of them", names[0])
    return found[0] if found else None


def refuse_beside_calls(body: Asked) -> None:
    """Problem 400 where a call is required and the answer is guided as well."""
    names = [name for name in (*_GUIDED, "structured_outputs") if getattr(body, name) is not None]
    if names:
        raise bad(f"{names[0]} and a required call of a tool exclude each other; give one of them", names[0])


def _of_outputs(given: StructuredOutputs) -> Structure:
    for name in _UNSUPPORTED:
        if getattr(given, name):
            raise bad(f"structured_outputs.{name} is not supported; leave it out", f"structured_outputs.{name}")
    named = [name for name in _KINDS if getattr(given, name) is not None] + ["json_object"] * bool(given.json_object)
    if len(named) != 1:
        raise bad(
            f"structured_outputs says {' and '.join(named) or 'nothing'}; give one of json, json_object, regex, "
            "choice, grammar",
            "structured_outputs",
        )
    param = f"structured_outputs.{named[0]}"
    if named[0] == "json_object":
        return json_structure({"type": "object"}, param)
    return _made(_KINDS[named[0]], getattr(given, named[0]), param)


def _of_format(given: ResponseFormat | None) -> Structure | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_structure({"type": "object"}, "response_format")
    param, source = f"response_format.{given.type}", getattr(given, given.type)
    if source is None:
        raise bad(f"response_format of type {given.type} needs {given.type}; add it", param)
    if given.json_schema is not None and given.type == "json_schema":
        return json_structure(given.json_schema.schema, f"{param}.schema")
    return _made(given.type, source, param)


def _made(kind: str, source: Any, param: str) -> Structure:
    """A structure of a field's value."""
    if kind == "json_schema":
        return json_structure(_schema(source, param), param)
    if kind == "choice" and any("\n" in text for text in source):
        raise bad("a choice has more than one line; use a regex instead", param)
    return _structure(kind, "\n".join(source) if kind == "choice" else source, param)


def _schema(source: Any, param: str) -> Mapping[str, Any]:
    """A schema, which may come as text."""
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise bad(f"{param} is not JSON ({str(error)[:200]}); correct it", param) from None
    if not isinstance(source, Mapping):
        raise bad(f"{param} is no JSON Schema; give an object", param)
    return source


def json_structure(schema: Mapping[str, Any], param: str) -> Structure:
    """An answer that is JSON of a schema."""
    if _depth(schema) > _MOST_DEPTH:
        raise bad(f"{param} is nested more than {_MOST_DEPTH} levels deep; flatten it", param)
    if any(_is_large(item.get("multipleOf")) for item in _objects(schema)):
        raise bad(f"{param} has a multipleOf beyond {_MOST_MULTIPLE:,}; leave it out", param)
    return _structure("json_schema", json.dumps(schema), param)


def _structure(kind: Any, source: str, param: str) -> Structure:
    if len(source) > _MOST_SOURCE:
        raise bad(f"{param} has {len(source):,} characters and may have {_MOST_SOURCE:,}; shorten it", param)
    try:
        return Structure(kind=kind, source=source)
    except BadInput as error:
        raise bad(str(error), param) from None


def _depth(value: Any) -> int:
    """Levels of lists and objects, by a walk that does not recurse."""
    deepest, level = 0, [value]
    while level and deepest <= _MOST_DEPTH:
        level = [inner for item in level for inner in _inner(item)]
        deepest += 1
    return deepest


def _objects(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a schema, whose depth is bounded."""
    if isinstance(schema, dict):
        yield schema
    for inner in _inner(schema):
        yield from _objects(inner)


def _is_large(multiple: Any) -> bool:
    return isinstance(multiple, int | float) and abs(multiple) > _MOST_MULTIPLE


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
