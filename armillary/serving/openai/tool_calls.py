"""Calls of functions in what a model writes: found as the text comes, in the ways the common families write them.

| family | how a call is written |
|---|---|
| hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and many others |
| mistral | `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| llama3 | the whole answer is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>` |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from armillary.serving.openai.schemas import Tool

FAMILIES = ("hermes", "mistral", "llama3")
_BEGIN, _END = "<tool_call>", "</tool_call>"
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class Call:
    """One call."""

    name: str
    arguments: str
    """as JSON text"""


class ToolStream(Protocol):
    """Splits a growing text into what is said and what is called."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """What is certain after some more text."""

    def finish(self) -> tuple[str, list[Call]]:
        """The rest, once the text is whole."""


def family_of(templates: Collection[str]) -> str | None:
    """How a model writes calls, by what its chat templates say."""
    text = "\n".join(templates)
    if "tools" not in text:
        return None
    if _BEGIN in text:
        return "hermes"
    if _MISTRAL in text:
        return "mistral"
    return "llama3" if _PYTHON in text or '"parameters"' in text else None


def special_tokens(family: str) -> frozenset[str]:
    """Special tokens that have to be seen to find calls."""
    found = {"mistral": {_MISTRAL, "[ARGS]", "[CALL_ID]"}, "llama3": {_PYTHON}, "hermes": {_BEGIN, _END}}
    return frozenset(found[family])


def tool_stream(family: str, names: Collection[str]) -> ToolStream:
    """For one answer; `names` are those of the functions there are."""
    if family == "hermes":
        return Tagged(names)
    if family == "mistral":
        return Whole(lambda text: mistral_calls(text, names), anywhere=_MISTRAL)
    return Whole(lambda text: llama_calls(text, names), anywhere=_PYTHON, at_start="{")


class Tagged:
    """Calls between tags, text around them."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        said, calls = "", list[Call]()
        while True:
            mark = _END if self._inside else _BEGIN
            place = self._held.find(mark)
            if place < 0:
                break
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            if self._inside:
                call = call_of(_loaded(before), self._names)
                said += "" if call else _BEGIN + before + _END
                calls += [call] if call else []
            else:
                said += before
            self._inside = not self._inside
        if not self._inside:
            kept = _overlap(self._held, _BEGIN)
            said, self._held = said + self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return said, calls

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        if not self._inside:
            return held, []
        call = call_of(_loaded(held), self._names)  # the closing tag may have been the model's end
        return ("", [call]) if call else (_BEGIN + held, [])


class Whole:
    """Calls that make up all the rest of the answer, from a mark on or from its beginning."""

    def __init__(self, parse: Callable[[str], list[Call]], *, anywhere: str, at_start: str = "") -> None:
        self._parse = parse
        self._mark = anywhere
        self._at_start = at_start
        self._held = ""
        self._opened = False
        self._said = False
        self._marked = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        if self._opened:
            return "", []
        place = self._held.find(self._mark)
        if place >= 0:
            said, self._held = self._held[:place], self._held[place + len(self._mark) :]
            self._opened = self._marked = True
            return said, []
        begins = self._held.lstrip()
        if not self._said and (not begins or (self._at_start and begins.startswith(self._at_start))):
            self._opened = bool(begins)
            return "", []
        kept = _overlap(self._held, self._mark)
        said, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._said = self._said or bool(said)
        return said, []

    def finish(self) -> tuple[str, list[Call]]:
        held, self._held = self._held, ""
        calls = self._parse(held) if self._opened else []
        return ("", calls) if calls else ((self._mark if self._marked else "") + held, [])


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def mistral_calls(text: str, names: Collection[str]) -> list[Call]:
    """A list of calls, or names each followed by their arguments."""
    whole = _loaded(text)
    if isinstance(whole, list):
        return _all_or_none([call_of(item, names) for item in whole])
    found: list[Call | None] = []
    for part in text.split(_MISTRAL):
        head = _NAMED.match(part)
        if head is None:
            return []
        arguments = _loaded(part[head.end() :])
        found.append(call_of({"name": head.group(1), "arguments": arguments}, names))
    return _all_or_none(found)


def llama_calls(text: str, names: Collection[str]) -> list[Call]:
    """One object a call, with `;` between them."""
    decoder, place, found = json.JSONDecoder(), 0, list[Call | None]()
    text = text.strip()
    while place < len(text):
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        found.append(call_of(item, names))
        rest = text[place:]
        place += len(rest) - len(rest.lstrip("; \n\t"))
    return _all_or_none(found)


def _all_or_none(calls: list[Call | None]) -> list[Call]:
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else []


def call_of(item: Any, names: Collection[str]) -> Call | None:
    """A call, where `item` is one of a function that there is."""
    if not isinstance(item, Mapping) or item.get("name") not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, Mapping):
        return None
    return Call(str(item["name"]), json.dumps(arguments, ensure_ascii=False))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- calls that are asked for: the answer is held to JSON


class Forced:
    """An answer that is nothing but calls: the arguments of one function, or a list of names with arguments."""

    def __init__(self, name: str | None, names: Collection[str]) -> None:
        self._name = name
        self._names = names
        self._held = ""

    def push(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        return "", []

    def finish(self) -> tuple[str, list[Call]]:
        found = _loaded(self._held)
        if self._name is not None:
            return ("", [Call(self._name, self._held)]) if self._held else ("", [])
        calls = _all_or_none([call_of(item, self._names) for item in found]) if isinstance(found, list) else []
        return ("", calls) if calls else (self._held, [])  # cut short by max_tokens


def forced_schema(tools: list[Tool], name: str | None, *, one: bool) -> dict[str, Any]:
    """The schema of an answer that calls the function `name`, or any of them."""
    shared: dict[str, Any] = {}
    schemas = {tool.function.name: _hoisted(tool.function.parameters, shared) for tool in tools}
    if name is not None:
        return schemas[name] | shared
    options = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {"name": {"const": option}, "arguments": schema},
        }
        for option, schema in schemas.items()
    ]
    most = {"maxItems": 1} if one else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": options}} | shared


def _hoisted(schema: Mapping[str, Any] | None, shared: dict[str, Any]) -> dict[str, Any]:
    """A schema without its definitions, which references look for at the top."""
    found = dict(schema or {})
    found.setdefault("type", "object")
    for key in ("$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            shared.setdefault(key, {}).update(found.pop(key))
    return found
