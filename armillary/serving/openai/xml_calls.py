"""Tool calls of Qwen3-Coder and DeepSeek, which are not plain JSON.

| family | format of a call |
|---|---|
| qwen3_coder | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>` |
| deepseek | after its mark: `function`, a mark, the name and JSON in a fence; or the name, a mark and JSON |
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)
DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|$)", re.DOTALL)
_FENCED = re.compile(r"([^\s`]+)\s*```(?:json)?\s*(.*?)\s*(?:```|$)", re.DOTALL)
DEEPSEEK_TOKENS = frozenset(
    {DEEPSEEK_BEGIN, "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"}
)
Schemas = Mapping[str, Mapping[str, Any]]
"""name of a function -> JSON Schema of its parameters"""


def qwen_call(text: str, schemas: Schemas) -> dict[str, Any] | None:
    """{name, arguments} of what is between the tags; values are read by the types of the schema."""
    match = _FUNCTION.fullmatch(text.rstrip())
    if match is None:
        return None
    name, body = match.groups()
    properties = schemas.get(name, {}).get("properties", {})
    arguments = {
        key: _value(value.removeprefix("\n").removesuffix("\n"), properties.get(key))
        for key, value in _PARAMETER.findall(body)
    }
    return {"name": name, "arguments": arguments}


def _value(text: str, schema: Any) -> Any:
    """A parameter's text as its type: text stays text, everything else is JSON where it is valid."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None, "null": None}.get(text.strip().lower(), text)


def deepseek_calls(text: str) -> list[dict[str, Any]]:
    """{name, arguments} of each call after the mark."""
    calls = []
    for head, body in _CALL.findall(text):
        fenced = _FENCED.match(body.strip()) if head.strip() == "function" else None
        name, arguments = fenced.groups() if fenced else (head.strip(), body.strip())
        calls.append({"name": name, "arguments": arguments})
    return calls
