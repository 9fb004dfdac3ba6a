"""Decodes the body of a request as one of the classes of `schemas.py`.

Of the fields that the class does not define, one that would constrain the output is refused, because an output that
ignores it would look like one that obeys it; any other field is logged once.
"""

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.http.server import Say

_CONSTRAINTS = {
    "guided_decoding": "structured_outputs",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "json_object": "response_format",
    "structural_tag": "structured_outputs",
    "logits_processors": "logit_bias",
    "logits_processor": "logit_bias",
    "functions": "tools",
    "function_call": "tool_choice",
    "use_beam_search": "n",
    "custom_logit_processor": "logit_bias",
    "bad_words_ids": "bad_words",
    "stop_regex": "stop",
    "no_repeat_ngram_size": "repetition_penalty",
}
"""field of another server -> the field of this one"""
_SILENT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""fields of OpenAI that do not affect the output"""
_MAX_LOGGED = 100
"""names that are logged, so that a client cannot fill the log"""
T = TypeVar("T")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Problem 400 where `body` is not JSON of that kind."""
    try:
        decoded: T = _decoder(cast(Hashable, kind)).decode(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _validation_problem(str(error)) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not JSON ({error}); correct it") from None
    except UnicodeDecodeError:
        raise bad_request("the body is not JSON (not UTF-8); correct it") from None
    except RecursionError:
        raise bad_request("the body is not JSON that can be read (nested too deeply); flatten it") from None


def _validation_problem(text: str) -> Problem:
    """msgspec's message, with the field first."""
    place = _PLACE.search(text)
    param = place.group(1) if place else ""
    message = text[: place.start()] if place else text
    lacking = _MISSING.match(message)
    if lacking:
        where = f"{param}.{lacking.group(1)}" if param else lacking.group(1)
        return bad_request(f"{where} is missing; add it to the request", where)
    return bad_request(
        f"{param or 'the body'}: {message[:1].lower() + message[1:]}; correct the request", param or None
    )


@lru_cache
def _known(kind: Any) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) | _SILENT


class UnknownFields:
    """The unknown fields that one server has seen."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._seen: set[str] = set()

    def check(self, body: bytes, kind: type) -> None:
        """Problem 400 where `body`, decoded as `kind`, has a constraint that is not supported."""
        given = _KEYS.decode(body)
        for name in given.keys() - _known(cast(Hashable, kind)):
            if bytes(given[name]) in (b"null", b"false"):
                continue
            if name in _CONSTRAINTS or name.startswith("guided_"):
                raise bad_request(f"{name} is not supported; use {_CONSTRAINTS.get(name, 'structured_outputs')}", name)
            self._log(name[:64])

    def _log(self, name: str) -> None:
        if name in self._seen or len(self._seen) >= _MAX_LOGGED:
            return
        self._seen.add(name)
        more = "; further fields are not logged" if len(self._seen) == _MAX_LOGGED else ""
        self._say(f"a request has the unknown field {name!a}, which is ignored{more}")
