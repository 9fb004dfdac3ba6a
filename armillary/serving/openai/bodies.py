"""Bodies into the classes of `schemas.py`, and what is wrong with them in one line that names the field."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from armillary.serving.http.problem import Problem, bad

T = TypeVar("T")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read(body: bytes, kind: type[T]) -> T:
    """Problem 400 where `body` is not JSON of that kind."""
    try:
        found: T = _decoder(cast(Hashable, kind)).decode(body)
        return found
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except msgspec.DecodeError as error:
        raise bad(f"the body is not JSON ({error}); correct it") from None
    except UnicodeDecodeError:
        raise bad("the body is not JSON (not UTF-8); correct it") from None
    except RecursionError:
        raise bad("the body is not JSON that can be read (nested too deeply); flatten it") from None


def _wrong(text: str) -> Problem:
    """msgspec's message, with the field first."""
    place = _PLACE.search(text)
    param = place.group(1) if place else ""
    said = text[: place.start()] if place else text
    lacking = _MISSING.match(said)
    if lacking:
        where = f"{param}.{lacking.group(1)}" if param else lacking.group(1)
        return bad(f"{where} is missing; add it to the request", where)
    said = said[:1].lower() + said[1:]
    return bad(f"{param or 'the body'}: {said}; correct the request", param or None)
