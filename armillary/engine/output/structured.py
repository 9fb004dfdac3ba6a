"""Structures by llguidance (the `structure` extra): JSON schemas, regular expressions, Lark grammars and choices.

A structure is compiled once and copied per sequence; allowed tokens are computed while a step runs.
"""

import json
from typing import Any

from armillary.engine.request.constraint import Constraint, Structure
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.errors import BadInput, missing
from armillary.model.text.tokenizer import Tokenizer

_MOST_KEPT = 256  # most compiled structures that are kept, least recently used dropped first


class Matched:
    """The constraint of one sequence."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    def advance(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())


class Structures:
    """Compiled structures of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._wrapped: Any = None
        self._compiled: dict[Structure, Any] = {}

    def knows(self, structure: Structure) -> bool:
        """Whether it is compiled already."""
        return structure in self._compiled

    def maker(self, structure: Structure) -> MakeConstraint:
        """Makes a constraint per sequence; the first raises BadInput where the structure is invalid."""
        return lambda: self._made(structure)

    def _made(self, structure: Structure) -> Constraint:
        matcher = self._compiled.pop(structure, None) or self._compile(structure)
        self._compiled[structure] = matcher  # now the most recent
        while len(self._compiled) > _MOST_KEPT:
            self._compiled.pop(next(iter(self._compiled)), None)
        return Matched(matcher.deep_copy())

    def _compile(self, structure: Structure) -> Any:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ModuleNotFoundError:
            raise missing("llguidance", "structured answers", "structure") from None
        if self._tokenizer is None:
            raise BadInput("a structure is of text and this model has no tokenizer.json; leave structure out")
        if self._wrapped is None:
            ends = list(self._tokenizer.eos_ids) or None
            self._wrapped = LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab, eos_token=ends)
        try:
            grammar = _grammar(LLMatcher, structure)
        except ValueError as error:
            raise BadInput(f"the {structure.kind} cannot be read ({_line(error)}); correct it") from None
        matcher = LLMatcher(self._wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise BadInput(f"the {structure.kind} cannot be used ({_line(matcher.get_error())}); correct it")
        return matcher


def _grammar(library: Any, structure: Structure) -> str:
    kind, source = structure.kind, structure.source
    if kind in ("json", "json_schema"):
        schema = json.loads(source) if kind == "json_schema" else {}
        return str(library.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))
    if kind == "regex":
        return str(library.grammar_from_regex(source))
    choice = "start: " + " | ".join(json.dumps(text) for text in source.splitlines() if text)
    return str(library.grammar_from_lark(_lark(source) if kind == "grammar" else choice))


def _lark(source: str) -> str:
    """A grammar in Lark's notation; those in llama.cpp's and vLLM's (GBNF, `root ::= …`) are rewritten."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if "::=" not in source:
        return source
    try:
        return str(any_to_lark(source))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from None


def _line(error: object) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:200]
