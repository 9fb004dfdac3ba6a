"""From the fields of a checked body to what the engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from armillary.errors import BadInput
from armillary.serving.api.problem import Problem, bad
from armillary.serving.api.schemas import Asked, ResponseFormat
from armillary.serving.engine.constraint import Structure
from armillary.serving.engine.params import SamplingParams

_MOST_SOURCE = 64_000
"""characters of a schema, expression or grammar"""
_MOST_DEPTH = 48
"""levels of a schema"""
_MOST_MULTIPLE = 10_000
"""larger ones take seconds to compile"""
_SEEDS = 2**61


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted of every prompt of a body."""

    params: SamplingParams
    """for the engine, without stop texts"""
    stop: tuple[str, ...]
    """stop texts, which are looked for in the server"""
    timeout_s: float | None
    """given up after so long"""
    own_time: bool
    """that is what the client itself asked for"""
    priority: int
    salt: str


def wish_of(
    body: Asked, *, max_tokens: int, most_s: float | None, structure: Structure | None,
    logprobs: int | None = None, prompt_logprobs: int | None = None,
) -> Wish:  # fmt: skip
    """Problem 400 where the fields cannot be had together."""
    top_p, top_k, stop, seed = body.top_p, body.top_k, body.stop, body.seed
    greedy = top_p == 0
    try:
        params = SamplingParams(
            n=body.n or 1, max_tokens=max_tokens, min_tokens=body.min_tokens or 0,
            temperature=0.0 if greedy else _or(body.temperature, 1.0), top_k=max(0, top_k or 0),
            top_p=1.0 if greedy or top_p is None else top_p, min_p=_or(body.min_p, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0), logit_bias=_bias(body.logit_bias),
            seed=None if seed is None else seed % _SEEDS, stop_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos), logprobs=logprobs, prompt_logprobs=prompt_logprobs,
            structure=structure,
        )  # fmt: skip
    except BadInput as error:
        raise bad(str(error), str(error).partition("=")[0] if "=" in str(error) else None) from None
    own_s = body.timeout_s
    times = [limit for limit in (own_s, most_s) if limit is not None]
    return Wish(
        params=params, stop=(stop,) if isinstance(stop, str) else tuple(stop or ()), timeout_s=min(times, default=None),
        own_time=own_s is not None and own_s == min(times), priority=body.priority or 0,
        salt=body.cache_salt or "",
    )  # fmt: skip


def late(wish: Wish) -> Problem:
    """The time is over: 408 where it was the client's own, 504 where it was the server's."""
    if wish.own_time:
        return Problem(408, "the answer took longer than timeout_s; ask for less or give it more time", code="timeout")
    return Problem(504, f"the answer took longer than {wish.timeout_s:g} s; ask for less", code="timeout")


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in (given or {}).items()}
    except ValueError:
        raise bad("logit_bias has a key that is no token id; use whole numbers", "logit_bias") from None


def structure_of(given: ResponseFormat | None) -> Structure | None:
    """What `response_format` asks for."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_structure({"type": "object"}, "response_format")
    param, source = f"response_format.{given.type}", getattr(given, given.type)
    if source is None:
        raise bad(f"response_format of type {given.type} needs {given.type}; add it", param)
    if given.json_schema is not None and given.type == "json_schema":
        return json_structure(given.json_schema.schema, f"{param}.schema")
    if given.type == "choice" and any("\n" in text for text in source):
        raise bad("a choice has more than one line; use a regex instead", param)
    return _structure(given.type, "\n".join(source) if given.type == "choice" else source, param)


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
