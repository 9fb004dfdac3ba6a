"""Tool calls in a model's output, parsed incrementally in the formats of the common model families.

| family | format of a call |
|---|---|
| hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen and many others |
| mistral | `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` |
| qwen3_coder, deepseek | see xml_calls.py |
| llama3 | the complete output is `{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>` |
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from armillary.serving.openai.schemas import Tool
from armillary.serving.openai.xml_calls import DEEPSEEK_BEGIN, DEEPSEEK_TOKENS, Schemas, deepseek_calls, qwen_call

_BEGIN, _END = "<tool_call>", "</tool_call>"
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_CALL_HEAD = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]+\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class ToolCallText:
    """A parsed tool call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolStream(Protocol):
    """Splits a growing output into text and tool calls."""

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        """Text and calls that are certain after some more output."""

    def finish(self) -> tuple[str, list[ToolCallText]]:
        """The rest, once the output is complete."""


def family_of(templates: Collection[str]) -> str | None:
    """The family of a model, from its chat templates; none: it has no known tool calls."""
    text = "\n".join(templates)
    if "tools" not in text:
        return None
    if DEEPSEEK_BEGIN in text:
        return "deepseek"
    if _BEGIN in text:
        return "qwen3_coder" if "<function=" in text else "hermes"
    if _MISTRAL in text:
        return "mistral"
    return "llama3" if _PYTHON in text or '"parameters"' in text else None


def special_tokens(family: str) -> frozenset[str]:
    """Special tokens that the parser of a family needs in the text."""
    tags = {_BEGIN, _END}
    marks: Mapping[str, Collection[str]] = {
        "mistral": {_MISTRAL, "[ARGS]", "[CALL_ID]"},
        "llama3": {_PYTHON},
        "hermes": tags,
        "qwen3_coder": tags,
        "deepseek": DEEPSEEK_TOKENS,
    }
    return frozenset(marks[family])


def tool_stream(family: str, names: Collection[str], schemas: Schemas | None = None) -> ToolStream:
    """The parser of one output; `names` are the names of the functions, `schemas` those of their parameters."""
    if family == "hermes":
        return TaggedCalls(lambda text: call_of(parse_json(text), names))
    if family == "qwen3_coder":
        return TaggedCalls(lambda text: call_of(qwen_call(text, schemas or {}), names))
    if family == "deepseek":
        parse = lambda text: _all_or_none([call_of(call, names) for call in deepseek_calls(text)])  # noqa: E731
        return TrailingCalls(parse, anywhere=DEEPSEEK_BEGIN)
    if family == "mistral":
        return TrailingCalls(lambda text: mistral_calls(text, names), anywhere=_MISTRAL)
    return TrailingCalls(lambda text: llama_calls(text, names), anywhere=_PYTHON, at_start="{")


class TaggedCalls:
    """Calls between tags, with text around them."""

    def __init__(self, parse: Callable[[str], ToolCallText | None]) -> None:
        self._parse = parse
        self._pending = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        self._pending += text
        shown, calls = "", list[ToolCallText]()
        while True:
            mark = _END if self._inside else _BEGIN
            place = self._pending.find(mark)
            if place < 0:
                break
            before, self._pending = self._pending[:place], self._pending[place + len(mark) :]
            if self._inside:
                call = self._parse(before)
                shown += "" if call else _BEGIN + before + _END
                calls += [call] if call else []
            else:
                shown += before
            self._inside = not self._inside
        if not self._inside:
            certain, self._pending = split_overlap(self._pending, _BEGIN)
            shown += certain
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCallText]]:
        pending, self._pending = self._pending, ""
        if not self._inside:
            return pending, []
        call = self._parse(pending)  # the closing tag may be the model's end token
        return ("", [call]) if call else (_BEGIN + pending, [])


class TrailingCalls:
    """Calls that take the rest of the output, from a mark on or from its beginning."""

    def __init__(self, parse: Callable[[str], list[ToolCallText]], *, anywhere: str, at_start: str = "") -> None:
        self._parse = parse
        self._mark = anywhere
        self._at_start = at_start
        self._pending = ""
        self._opened = False
        self._has_text = False
        self._marked = False

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        self._pending += text
        if self._opened:
            return "", []
        place = self._pending.find(self._mark)
        if place >= 0:
            shown, self._pending = self._pending[:place], self._pending[place + len(self._mark) :]
            self._opened = self._marked = True
            return shown, []
        begins = self._pending.lstrip()
        if not self._has_text and (not begins or (self._at_start and begins.startswith(self._at_start))):
            self._opened = bool(begins)
            return "", []
        shown, self._pending = split_overlap(self._pending, self._mark)
        self._has_text = self._has_text or bool(shown)
        return shown, []

    def finish(self) -> tuple[str, list[ToolCallText]]:
        pending, self._pending = self._pending, ""
        calls = self._parse(pending) if self._opened else []
        return ("", calls) if calls else ((self._mark if self._marked else "") + pending, [])


def split_overlap(text: str, mark: str) -> tuple[str, str]:
    """`text` split before its longest suffix that is a prefix of `mark`."""
    overlap = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - overlap], text[len(text) - overlap :]


def mistral_calls(text: str, names: Collection[str]) -> list[ToolCallText]:
    """A list of calls, or names each followed by their arguments."""
    items = parse_json(text)
    if isinstance(items, list):
        return _all_or_none([call_of(item, names) for item in items])
    calls: list[ToolCallText | None] = []
    for part in text.split(_MISTRAL):
        head = _CALL_HEAD.match(part)
        if head is None:
            return []
        calls.append(call_of({"name": head.group(1), "arguments": parse_json(part[head.end() :])}, names))
    return _all_or_none(calls)


def llama_calls(text: str, names: Collection[str]) -> list[ToolCallText]:
    """One object per call, separated by `;`."""
    decoder, place, calls = json.JSONDecoder(), 0, list[ToolCallText | None]()
    text = text.strip()
    while place < len(text):
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        calls.append(call_of(item, names))
        rest = text[place:]
        place += len(rest) - len(rest.lstrip("; \n\t"))
    return _all_or_none(calls)


def _all_or_none(calls: list[ToolCallText | None]) -> list[ToolCallText]:
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else []


def call_of(item: Any, names: Collection[str]) -> ToolCallText | None:
    """The call that `item` is; none where it is none, or of an unknown function."""
    if not isinstance(item, Mapping) or item.get("name") not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, Mapping):
        return None
    return ToolCallText(str(item["name"]), json.dumps(arguments, ensure_ascii=False))


def parse_json(text: str) -> Any:
    """None where `text` is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- required calls: the output is constrained to JSON


class ForcedCalls:
    """An output of calls only: the arguments of one function, or a list of names with arguments."""

    def __init__(self, name: str | None, names: Collection[str]) -> None:
        self._name = name
        self._names = names
        self._pending = ""

    def push(self, text: str) -> tuple[str, list[ToolCallText]]:
        self._pending += text
        return "", []

    def finish(self) -> tuple[str, list[ToolCallText]]:
        if self._name is not None:
            return ("", [ToolCallText(self._name, self._pending)]) if self._pending else ("", [])
        items = parse_json(self._pending)
        calls = _all_or_none([call_of(item, self._names) for item in items]) if isinstance(items, list) else []
        return ("", calls) if calls else (self._pending, [])  # truncated by max_tokens


def forced_schema(tools: list[Tool], name: str | None, *, single: bool) -> dict[str, Any]:
    """The schema of an output that calls the function `name`, or any function."""
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
    limit = {"maxItems": 1} if single else {}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": options}} | shared


def _hoisted(schema: Mapping[str, Any] | None, shared: dict[str, Any]) -> dict[str, Any]:
    """A schema without its definitions, which move to `shared`: references look for them at the top."""
    inner = dict(schema or {})
    inner.setdefault("type", "object")
    for key in ("$defs", "definitions"):
        if isinstance(inner.get(key), Mapping):
            shared.setdefault(key, {}).update(inner.pop(key))
    return inner
