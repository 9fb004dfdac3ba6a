"""Fields of a body that no class of `schemas.py` names: one that would hold an answer to something is refused by its
name, as an answer that does not keep to it would look like one that does; others are logged, each name once."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, cast

import msgspec

from armillary.serving.http.lines import Say
from armillary.serving.http.problem import bad

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
"""fields of other servers, and what there is here instead"""
_SILENT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""OpenAI's, which change nothing about an answer"""
_MOST_NAMES = 100
"""that are logged: whoever makes them up does not fill the log"""
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@lru_cache
def _known(kind: Any) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) | _SILENT


class UnknownFields:
    """What one server has seen of them."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._seen: set[str] = set()

    def check(self, body: bytes, kind: type) -> None:
        """Problem 400 where a body, which has been read as `kind`, asks for a constraint that is not known."""
        given = _KEYS.decode(body)
        for name in given.keys() - _known(cast(Hashable, kind)):
            if bytes(given[name]) in (b"null", b"false"):
                continue
            if name in _CONSTRAINTS or name.startswith("guided_"):
                raise bad(f"{name} is not supported; use {_CONSTRAINTS.get(name, 'structured_outputs')}", name)
            self._log(name[:64])

    def _log(self, name: str) -> None:
        if name in self._seen or len(self._seen) >= _MOST_NAMES:
            return
        self._seen.add(name)
        more = "; further ones are not logged" if len(self._seen) == _MOST_NAMES else ""
        self._say(f"a request has the field {name!a}, which is not known here and is ignored{more}")
