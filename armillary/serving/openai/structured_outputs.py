"""The structure that an output must match, from `response_format`, vLLM's `structured_outputs` or its older `guided_*`
fields, of which a body may have one."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from armillary.engine.request.constraint import Structure
from armillary.errors import BadInput
from armillary.serving.http.problem import bad_request
from armillary.serving.openai.schemas import ResponseFormat, SamplingFields, StructuredOutputs

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
"""fields of structured_outputs that would change which outputs match"""
_MAX_SOURCE_CHARS = 64_000
_MAX_DEPTH = 48
_MAX_MULTIPLE = 10_000
"""larger values of multipleOf take seconds to compile"""


def structure_of(body: SamplingFields) -> Structure | None:
    """The structure that a body asks for; Problem 400 where it asks for several."""
    given = {name: getattr(body, name) for name in _GUIDED if getattr(body, name) is not None}
    structures = {name: _from_source(_GUIDED[name], source, name) for name, source in given.items()}
    if body.structured_outputs is not None:
        structures["structured_outputs"] = _from_outputs(body.structured_outputs)
    if (by_format := _from_format(body.response_format)) is not None:
        structures["response_format"] = by_format
    if len(structures) > 1:
        raise bad_request(f"{' and '.join(structures)} are given together; give one of them", next(iter(structures)))
    return next(iter(structures.values()), None)


def refuse_structure_with_calls(body: SamplingFields) -> None:
    """Problem 400 where a body requires a tool call and asks for a structure as well."""
    names = [name for name in (*_GUIDED, "structured_outputs") if getattr(body, name) is not None]
    if names:
        raise bad_request(f"{names[0]} and a required tool call exclude each other; give one of them", names[0])


def _from_outputs(given: StructuredOutputs) -> Structure:
    for name in _UNSUPPORTED:
        if getattr(given, name):
            raise bad_request(f"structured_outputs.{name} is not supported; leave it out", f"structured_outputs.{name}")
    kinds = [name for name in _KINDS if getattr(given, name) is not None] + ["json_object"] * bool(given.json_object)
    if len(kinds) != 1:
        raise bad_request(
            f"structured_outputs has {' and '.join(kinds) or 'nothing'}; give one of json, json_object, regex, "
            "choice, grammar",
            "structured_outputs",
        )
    param = f"structured_outputs.{kinds[0]}"
    if kinds[0] == "json_object":
        return json_structure({"type": "object"}, param)
    return _from_source(_KINDS[kinds[0]], getattr(given, kinds[0]), param)


def _from_format(given: ResponseFormat | None) -> Structure | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_structure({"type": "object"}, "response_format")
    param, source = f"response_format.{given.type}", getattr(given, given.type)
    if source is None:
        raise bad_request(f"response_format of type {given.type} needs {given.type}; add it", param)
    if given.json_schema is not None and given.type == "json_schema":
        return json_structure(given.json_schema.schema, f"{param}.schema")
    return _from_source(given.type, source, param)


def _from_source(kind: str, source: Any, param: str) -> Structure:
    """The structure of a field's value."""
    if kind == "json_schema":
        return json_structure(_schema(source, param), param)
    if kind == "choice" and any("\n" in text for text in source):
        raise bad_request("a choice has more than one line; use a regex instead", param)
    return _structure(kind, "\n".join(source) if kind == "choice" else source, param)


def _schema(source: Any, param: str) -> Mapping[str, Any]:
    """A JSON Schema, given as an object or as JSON text."""
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{param} is not JSON ({str(error)[:200]}); correct it", param) from None
    if not isinstance(source, Mapping):
        raise bad_request(f"{param} is no JSON Schema; give an object", param)
    return source


def json_structure(schema: Mapping[str, Any], param: str) -> Structure:
    """The structure of JSON that matches a schema."""
    levels = list(islice(_levels(schema), _MAX_DEPTH + 1))
    if len(levels) > _MAX_DEPTH:
        raise bad_request(f"{param} is nested more than {_MAX_DEPTH} levels deep; flatten it", param)
    multiples = [item.get("multipleOf") for level in levels for item in level if isinstance(item, dict)]
    if any(isinstance(multiple, int | float) and abs(multiple) > _MAX_MULTIPLE for multiple in multiples):
        raise bad_request(f"{param} has a multipleOf beyond {_MAX_MULTIPLE:,}; leave it out", param)
    return _structure("json_schema", json.dumps(schema), param)


def _structure(kind: Any, source: str, param: str) -> Structure:
    if len(source) > _MAX_SOURCE_CHARS:
        raise bad_request(
            f"{param} has {len(source):,} characters and may have {_MAX_SOURCE_CHARS:,}; shorten it", param
        )
    try:
        return Structure(kind=kind, source=source)
    except BadInput as error:
        raise bad_request(str(error), param) from None


def _levels(schema: Any) -> Iterator[list[Any]]:
    """The values of a schema, level by level of its nesting."""
    level = [schema]
    while level:
        yield level
        lists = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = list(chain.from_iterable(lists))
